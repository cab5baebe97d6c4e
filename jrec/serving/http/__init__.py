"""An exported model behind HTTP: ``jrec serve``. Needs the extra ``serve``."""
