"""Whether compression pays off: one curve of step time against bandwidth, and its effect on the loss.

`speedup` predicts the steps of a job, with each method's own code timed here (`codecs`). `curve` has the lines, the
threshold and the sentences that all panels share; `loss_increase` has measured losses.
"""
