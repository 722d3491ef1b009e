"""What is read from the console's database, a file a page: from rows to the records of `store.pages`.

Apart from the importer because the two meet in the tables alone. No page reads the observations, none asks more often because
there is more to show, and every list has an end; so a page takes as long over ten million observations as over ten.
"""

from bitwitness.errors import NotFound as NotFound
from bitwitness.store.queries.change import change as change
from bitwitness.store.queries.drills import drills_page as drills_page
from bitwitness.store.queries.exports import EXPORTS as EXPORTS
from bitwitness.store.queries.exports import export as export
from bitwitness.store.queries.fleet import fleet_page as fleet_page
from bitwitness.store.queries.history import history as history
from bitwitness.store.queries.incident import find_incident as find_incident
from bitwitness.store.queries.incident import incident_page as incident_page
from bitwitness.store.queries.node import device_page as device_page
from bitwitness.store.queries.node import node_page as node_page
from bitwitness.store.queries.run import run_page as run_page
from bitwitness.store.queries.runs import runs_page as runs_page
