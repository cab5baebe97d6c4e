"""jrec on a Ray cluster: ``fit`` trains on its workers, ``RayExecutor`` prepares logs by them. The extra ``ray``."""

from jrec.ray.executor import RayExecutor as RayExecutor
from jrec.ray.executor import connected as connected
from jrec.ray.fit import fit as fit
