"""The files of a run: the only place that knows their names and formats (DESIGN section 4).

They are the whole contract between the guard, which knows tensors, and the fleet, which knows clusters, so they outlive
the process that wrote them: a `kill -9` at any instant leaves each file whole or absent, and a journal may end in one torn
line. No torch here.
"""

from bitwitness.runfiles.checkpoints import Checkpoints as Checkpoints
from bitwitness.runfiles.checkpoints import checkpoint_name as checkpoint_name
from bitwitness.runfiles.checkpoints import checkpoint_step as checkpoint_step
from bitwitness.runfiles.checkpoints import retained as retained
from bitwitness.runfiles.files import SCHEMA as SCHEMA
from bitwitness.runfiles.files import read_json as read_json
from bitwitness.runfiles.files import refresh_folder as refresh_folder
from bitwitness.runfiles.files import utc_now as utc_now
from bitwitness.runfiles.files import write_bytes as write_bytes
from bitwitness.runfiles.files import write_json as write_json
from bitwitness.runfiles.journal import Journal as Journal
from bitwitness.runfiles.journal import read_journal as read_journal
from bitwitness.runfiles.label import FileDigest as FileDigest
from bitwitness.runfiles.label import Label as Label
from bitwitness.runfiles.label import digest_file as digest_file
from bitwitness.runfiles.label import digest_files as digest_files
from bitwitness.runfiles.label import distrust as distrust
from bitwitness.runfiles.label import label_path as label_path
from bitwitness.runfiles.label import labelled as labelled
from bitwitness.runfiles.label import read_label as read_label
from bitwitness.runfiles.label import verify_files as verify_files
from bitwitness.runfiles.label import write_label as write_label
from bitwitness.runfiles.quarantine import Denial as Denial
from bitwitness.runfiles.quarantine import Quarantine as Quarantine
from bitwitness.runfiles.quarantine import QuarantineFile as QuarantineFile
from bitwitness.runfiles.quarantine import Strike as Strike
from bitwitness.runfiles.run import Incident as Incident
from bitwitness.runfiles.run import RunFiles as RunFiles
from bitwitness.runfiles.run import new_incident_id as new_incident_id
from bitwitness.runfiles.run import read_actions as read_actions
from bitwitness.runfiles.run import read_incident as read_incident
