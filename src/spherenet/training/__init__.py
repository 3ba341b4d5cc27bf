"""Training: one configuration, what it builds, the loop on torch's own DDP and AMP, evaluation and saved runs.

The names live in `__init__.pyi`; each is imported when it is first used, so that `spherenet train --help` does not
wait for torch.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
