"""jrec on a Ray cluster: ``fit`` trains on its workers, ``RayExecutor`` prepares logs by them. The extra ``ray``."""

from jrec.app.ray.executor import RayExecutor as RayExecutor
from jrec.app.ray.executor import connected as connected
from jrec.app.ray.fit import fit as fit
