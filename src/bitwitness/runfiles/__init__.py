"""The files of a run: the only place that knows their names and formats (DESIGN section 4).

They are the whole contract between the guard, which knows tensors, and the fleet, which knows clusters, so they outlive
the process that wrote them: a `kill -9` at any instant leaves each file whole or absent, and a journal may end in one torn
line. No torch here.
"""

from bitwitness.runfiles.files import SCHEMA as SCHEMA
from bitwitness.runfiles.files import read_json as read_json
from bitwitness.runfiles.files import utc_now as utc_now
from bitwitness.runfiles.files import write_bytes as write_bytes
from bitwitness.runfiles.files import write_json as write_json
from bitwitness.runfiles.journal import Journal as Journal
from bitwitness.runfiles.journal import read_journal as read_journal
from bitwitness.runfiles.run import Incident as Incident
from bitwitness.runfiles.run import RunFiles as RunFiles
from bitwitness.runfiles.run import new_incident_id as new_incident_id
from bitwitness.runfiles.run import read_incident as read_incident
