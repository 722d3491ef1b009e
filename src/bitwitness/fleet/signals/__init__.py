"""What the hardware says of itself, each source read by one module and told in one kind of record.

Silent corruption is silent: that a log says nothing is no sign of health. So a reader that cannot read says *no evidence*,
and nothing here can turn damage into good news.
"""

from bitwitness.fleet.signals.record import Signal as Signal
from bitwitness.fleet.signals.record import SignalClass as SignalClass
from bitwitness.fleet.signals.record import Weight as Weight
from bitwitness.fleet.signals.record import no_evidence as no_evidence
