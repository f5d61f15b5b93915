"""The Fault Lab: what failed in a run, how the run recovered, and which steps were lost; and buttons to break a run.

_view     the timeline and its sentences
_breaker  the buttons that break a running run; `_words` says what each will do
_resizer  the button that changes the number of ranks
_resumer  the button that continues a run
_lab      the widget; the Training Lab contains the others
"""

from shardscope_widgets.fault_lab._breaker import Breaker
from shardscope_widgets.fault_lab._lab import FaultLab
from shardscope_widgets.fault_lab._resumer import Resumer, carry_on
from shardscope_widgets.fault_lab._view import FaultsView

__all__ = ["Breaker", "FaultLab", "FaultsView", "Resumer", "carry_on"]
