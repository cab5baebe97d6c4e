"""Plans that keep rows in host memory train as one device does, whatever the pipeline's queues, and move."""

import mesh_runs
import pytest
from mesh_runs import OPTIMIZERS
from test_train_mesh import alone, some_plan

pytestmark = pytest.mark.usefixtures("quick_compilation")

QUICK, LONG = 6, 50


@pytest.mark.parametrize(("devices", "steps"), [(2, QUICK), pytest.param(4, LONG, marks=pytest.mark.slow)])
def test_devices_with_rows_in_host_memory_train_as_one(devices, steps):
    plan = some_plan(devices, seed=devices, replicate=0.3, host=0.4, tt=False)
    found = mesh_runs.on_mesh_of(plan, OPTIMIZERS["rowwise_adagrad"], steps, tt=False)
    mesh_runs.assert_close(found, alone("rowwise_adagrad", steps, tt=False))
