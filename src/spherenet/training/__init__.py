"""Training: configuration, building, the loop on torch's DDP and AMP, evaluation, probes and saved runs.

`__init__.pyi` lists the names. Each is imported when it is first used, so that `spherenet train --help` does not import
torch.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
