"""Learning on hyperspheres with PyTorch: layers that answer with angles, angular losses, SphereNets.

The names live in `__init__.pyi`; each is imported when it is first used, so that `import spherenet` and
`spherenet --help` do not wait for torch.
"""

from importlib.metadata import version as _version

import lazy_loader as _lazy

__version__ = _version("spherenet")

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
