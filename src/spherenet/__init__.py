"""Deep hyperspherical learning with PyTorch: layers that compute functions of angles, angular losses and SphereNets.

Public names are listed in `__init__.pyi` and imported on first use, so that `import spherenet` and `spherenet --help`
do not import torch. The list itself is read on first use, too: until then the package imports nothing.
"""

__version__ = "0.1.0.dev0"


def _names():
    """Return the public names and the function that imports one of them."""
    if "__all__" not in globals():
        import lazy_loader

        public_name, _, names = lazy_loader.attach_stub(__name__, __file__)
        globals().update(_public_name=public_name, __all__=names)
    return globals()["__all__"], globals()["_public_name"]


def __dir__():
    """Return the public names."""
    return list(_names()[0])


def __getattr__(name):
    """Import a public name on first use; a name that does not exist raises AttributeError with similar ones."""
    if name.startswith("__") and name != "__all__":  # Python looks these up, e.g. while it imports submodules
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names, public_name = _names()
    if name == "__all__":
        return names
    if name in names:
        return public_name(name)
    from spherenet._util.names import missing_name

    raise AttributeError(missing_name(name, names))
