"""Deep hyperspherical learning with PyTorch: layers that compute functions of angles, angular losses and SphereNets.

Public names are listed in `__init__.pyi` and imported on first use, so that `import spherenet` and `spherenet --help`
do not import torch.
"""

import lazy_loader as _lazy

__version__ = "0.1.0.dev0"

_public_name, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)


def __getattr__(name):
    """Import a public name on first use; a name that does not exist raises AttributeError with similar ones."""
    if name in __all__ or name.startswith("__"):
        return _public_name(name)
    from spherenet._util.names import missing_name

    raise AttributeError(missing_name(name, __all__))
