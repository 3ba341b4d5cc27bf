"""Deep hyperspherical learning with PyTorch: layers that compute functions of angles, angular losses and SphereNets.

Public names are listed in `__init__.pyi` and imported on first use, so that `import spherenet` and `spherenet --help`
do not import torch.
"""

import lazy_loader as _lazy

__version__ = "0.1.0.dev0"

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
