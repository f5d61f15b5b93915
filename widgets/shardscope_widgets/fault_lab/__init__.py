"""The Fault Lab: shows what failed in a run, how it recovered and which steps were lost, with buttons that inject
faults.

_view     the timeline and its sentences
_breaker  the buttons that inject faults into a running run; `_words` describes what each button does
_resizer  the button that changes the number of ranks
_resumer  the button that continues a run
_lab      the widget; the Training Lab contains the other parts
"""

from shardscope_widgets.fault_lab._breaker import Breaker
from shardscope_widgets.fault_lab._lab import FaultLab
from shardscope_widgets.fault_lab._resumer import Resumer, carry_on
from shardscope_widgets.fault_lab._view import FaultsView

__all__ = ["Breaker", "FaultLab", "FaultsView", "Resumer", "carry_on"]
