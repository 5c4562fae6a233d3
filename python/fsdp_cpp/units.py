"""Which modules of a model are units: those that are gathered and reduced together."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from torch import nn

from . import _C

Selector: TypeAlias = type[nn.Module] | str | nn.Module | Callable[[nn.Module], bool]
Units: TypeAlias = Selector | Collection[Selector] | None

# Modules outside the repeated blocks become units of their own from this part of a block's size on: an embedding or a head,
# but not a norm, whose gather would cost more than its memory.
_LARGE = 0.1


def find(model: nn.Module, units: Units) -> dict[nn.Module, str]:
    """The modules that `units` names, with the model itself, as {module: name} in the order of the tree.

    `units` is None for the default (see repeated_blocks()), or a class, a name or pattern of names, a predicate over modules,
    or a list of these. UsageError for one that matches no module.
    """
    if units is None:
        chosen = default_units(model)
    else:
        chosen = set()
        for selector in listed(units):
            matched = _matched(model, selector)
            if not matched:
                raise _C.UsageError(_nothing_matches(model, selector))
            for module in matched:
                _refuse_containers(module, selector)
            chosen |= matched
    chosen.add(model)
    return {module: name for name, module in model.named_modules() if module in chosen}


def _refuse_containers(module, selector):
    if type(module).forward is nn.Module.forward:
        raise _C.UsageError(f"units has {selector!r}, which is a {type(module).__name__}: nothing calls it, so nothing would gather it; "
                            "name the modules inside it (a pattern such as 'blocks.*'), or the module around it")


def listed(units: Units) -> list[Selector]:
    if units is None:
        return []
    return list(units) if isinstance(units, (list, tuple, set, frozenset)) else [units]


def default_units(model: nn.Module) -> set[nn.Module]:
    """Repeated blocks, the modules that hold them, and large layers beside them (embeddings, heads)."""
    stacks = repeated_blocks(model)
    blocks = [block for stack in stacks for block in stack.children()]
    chosen = set(blocks)
    inside = {module for block in blocks for module in block.modules()}
    if blocks:
        threshold = _LARGE * sum(map(_numel, blocks)) / len(blocks)
        for module in model.modules():
            if module not in inside and isinstance(module, (nn.Embedding, nn.Linear)) and _numel(module) >= threshold:
                chosen.add(module)
    # The module that a stack is called through (an encoder, say) may be called without the model around it.
    in_stacks = set(stacks)
    chosen.update(module for module in model.modules()
                  if module not in inside and any(child in in_stacks for child in module.children()))
    return chosen


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost lists of modules (ModuleList, Sequential) in which classes repeat, every module with parameters."""
    found: list[nn.Module] = []

    def visit(module):
        children = list(module.children())
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
            classes = {type(child) for child in children}
            if len(classes) < len(children) and all(_numel(child) > 0 for child in children):
                found.append(module)
                return
        for child in children:
            visit(child)

    visit(model)
    return found


def described(chosen: Iterable[nn.Module]) -> str:
    """One line for people: "32 x LlamaDecoderLayer, Embedding, Linear, LlamaForCausalLM"."""
    counts: dict[str, int] = {}
    for module in chosen:
        name = type(module).__name__
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def _numel(module):
    return sum(parameter.numel() for parameter in module.parameters())


def _matched(model, selector):
    if isinstance(selector, type):
        return {module for module in model.modules() if isinstance(module, selector)}
    if isinstance(selector, str):
        # `*` is any text between two dots, as in C++.
        pattern = re.compile(re.escape(selector).replace(r"\*", "[^.]*").replace(r"\?", "[^.]"))
        return {module for name, module in model.named_modules() if name and pattern.fullmatch(name)}
    if isinstance(selector, nn.Module):
        return {module for module in model.modules() if module is selector}
    if callable(selector):
        return {module for module in model.modules() if selector(module)}
    raise _C.UsageError(f"units has {selector!r} ({type(selector).__name__}); it takes classes, names or patterns of names, "
                        "modules, and functions of a module")


def _nothing_matches(model, selector):
    if isinstance(selector, str):
        names = [name for name, _ in model.named_modules() if name]
        return f"units has '{selector}', which matches no module; there are {_examples(names)}"
    if isinstance(selector, type):
        classes = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
        return f"units has the class {selector.__name__}, of which the model has no module; it has {_examples(classes)}"
    return f"units has {selector!r}, which matches no module of the model"


def _examples(names, shown=8):
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"'{name}'" for name in names[:shown]) + more
