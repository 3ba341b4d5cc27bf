"""Which module directly follows which, where that is certain.

Certain are the order of an `nn.Sequential` and what symbolic tracing sees of a module's own forward. The order in which
a module registers its parts is not: a block that normalises before its convolutions often registers them first.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator

from torch import nn

__all__ = ["is_chain", "next_in_chains", "traced_inputs"]


def is_chain(module: nn.Module) -> bool:
    """Return whether a module runs its children one after the other, as `nn.Sequential` does."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def next_in_chains(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each pair of modules of which the second gets what the first returns, by the order of chains.

    Chains within chains are one chain. `nn.Identity` passes its input on: a module before it is followed by the one
    after it too.
    """
    inner = {id(child) for module in model.modules() if is_chain(module) for child in module.children()}
    for module in model.modules():
        if is_chain(module) and id(module) not in inner:
            before: list[nn.Module] = []
            for link in _links(module):
                for earlier in before:
                    yield earlier, link
                before = [*before, link] if isinstance(link, nn.Identity) else [link]


def _links(chain: nn.Module) -> Iterator[nn.Module]:
    for child in chain._modules.values():  # not children(): a module may occur twice
        if child is not None:
            yield from _links(child) if is_chain(child) else [child]


def traced_inputs(module: nn.Module) -> dict[nn.Module, list[nn.Module]] | None:
    """Return, for each part that a module's forward calls, the parts whose output it was called on.

    By symbolic tracing with the parts unopened; anything but a part (an input, a sum) stands as the module itself.
    Returns None where the forward cannot be traced (control flow that depends on data).
    """
    from torch import fx  # heavy, and only asked for where BatchNorm is dropped

    class _PartsUnopened(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    try:
        # A copy that shares the parts: whatever the forward writes on its module while traced stays on the copy.
        twin = copy.deepcopy(module, {id(child): child for child in module.children()})
        arguments = inspect.signature(twin.forward).parameters.values()
        defaults = {a.name: a.default for a in arguments if a.default is not a.empty}
        graph = _PartsUnopened().trace(twin, defaults)
    except Exception:  # whatever a forward raises that was not written for tracing
        return None
    calls: dict[nn.Module, list[nn.Module]] = {}
    made_by: dict[fx.Node, nn.Module] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            part = twin.get_submodule(str(node.target))
            source = made_by.get(node.args[0], module) if node.args else module
            calls.setdefault(part, []).append(source)
            made_by[node] = source if isinstance(part, nn.Identity) else part
    return calls
