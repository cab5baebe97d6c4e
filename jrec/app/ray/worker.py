"""``python -m jrec.app.ray.worker``: the ``jrec`` command as the child of a Ray worker, with which it ends."""

from __future__ import annotations

import os
import sys
import threading


def _end_with_parent() -> None:
    """Ends this process when the pipe that its parent holds is closed, however the parent ended.

    Otherwise a killed worker's process would go on with the run that Ray starts anew.
    """
    while os.read(0, 1):
        pass
    os._exit(2)


if __name__ == "__main__":
    from jrec.cli import main

    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main())
