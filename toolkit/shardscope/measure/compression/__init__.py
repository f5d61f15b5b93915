"""Whether compression pays off: one curve of step time against bandwidth, and its effect on the loss.

`speedup` predicts the steps of a job, with each method's own code timed here (`codecs`). `curve` contains the lines,
the threshold and the sentences that all panels share, and `loss_increase` the measured losses.
"""
