"""Whether compression pays off: predicted steps with packing times measured here, and its effect on the loss.

`speedup` predicts whole steps, `break_even` compares the exchange of gradients alone. Both time each method's own code
(`codecs`); `loss_increase` has measured losses.
"""
