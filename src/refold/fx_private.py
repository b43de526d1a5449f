"""The only file of the core that touches underscore names of torch; each has a test in test_fx_private.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

HISTORY = "_refold"
"""The plain attribute of a GraphModule that carries its history."""

TABLES = ("_parameters", "_buffers", "_modules")
"""The three tables every nn.Module keeps its tensors and children in."""

# What GraphModule keeps about its own graph, and the history: derived from the graph, or restored with it.
_DERIVED = frozenset(
    {"_graph", "_code", "_lineno_map", "_prologue_start", "_in_spec", "_out_spec", "meta", "_tracer_cls"}
    | {"_tracer_extras", "_replace_hooks", "_create_node_hooks", "_erase_node_hooks", "_deepcopy_hooks", "shape_env"}
    | {HISTORY}
)
# The generated functions on the class that belongs to one GraphModule.
_GENERATED = ("forward", "__call__", "_wrapped_call", "_call_impl")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


# --- modules -----------------------------------------------------------------------------------------------------


def table(module: nn.Module, name: str) -> dict[str, Any]:
    """One of a module's tables, itself (not a copy)."""
    found: dict[str, Any] = module.__dict__[name]
    return found


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes without its tables and without what a GraphModule derives from its graph."""
    return without_tables(module, module.__dict__)


def without_tables(module: nn.Module, attributes: dict[str, Any]) -> dict[str, Any]:
    """Those of a module's attributes that are plain."""
    skip = _DERIVED.union(TABLES) if isinstance(module, GraphModule) else TABLES
    return {k: v for k, v in attributes.items() if k not in skip}


def tensors_of(modules: list[nn.Module]) -> list[torch.Tensor]:
    """The parameters, then the buffers, of modules; some scripted ones have no tables."""
    live = [module.__dict__ for module in modules]
    tables = [attributes.get(kind) for kind in ("_parameters", "_buffers") for attributes in live]
    return [tensor for table in filter(None, tables) for tensor in table.values() if tensor is not None]


def put_attributes_back(module: nn.Module, attributes: dict[str, Any]) -> None:
    """Let a module have just these attributes; what a GraphModule derives from its graph comes back with the graph."""
    live = module.__dict__
    hidden: frozenset[str] = _DERIVED if isinstance(module, GraphModule) else frozenset()
    for name in [name for name in live if name not in attributes and name not in hidden]:
        del live[name]
    live.update({name: value for name, value in attributes.items() if name not in hidden})


def set_plain_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute without nn.Module's interference."""
    module.__dict__[name] = value


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is hooked onto a module's call, gradients or state, besides what FSDP hooks onto the state of
    every module, so that states are taken of shards."""
    hooks = [hook for name in _HOOKS for hook in (getattr(module, name, None) or {}).values()]
    return not all(getattr(hook, "__module__", "").startswith(_FSDP_PARAMETERS) for hook in hooks)


def module_being_copied(memo: Mapping[int, Any]) -> GraphModule | None:
    """The GraphModule whose attributes a deep copy with this memo is copying: it is there, and has no graph yet."""
    begun = [thing for thing in memo.values() if issubclass(type(thing), GraphModule) and "_graph" not in vars(thing)]
    return begun[-1] if begun else None


def loads_by_itself(module: nn.Module) -> bool:
    """Whether a module has a way of its own to load its part of a checkpoint."""
    own = (type(module)._load_from_state_dict, type(module).set_extra_state)
    return own != (nn.Module._load_from_state_dict, nn.Module.set_extra_state)


def module_like(
    cls: type[nn.Module], attributes: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]] | None = None
) -> nn.Module:
    """A module of a class with these attributes; its __init__ does not run. It has tables of its own, with the entries
    that `tables` has, or else the attributes."""
    module = cls.__new__(cls)
    module.__dict__.update(attributes)
    for name in TABLES:
        module.__dict__[name] = dict((attributes if tables is None else tables).get(name, {}))
    return module


def with_own_containers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes for another module: hook tables and sets belong to one module, everything else is shared."""
    return {name: _copy_container(value) for name, value in attributes.items()}


def _copy_container(value: Any) -> Any:
    if not isinstance(value, dict | set):
        return value
    return value.copy() if value else type(value)()  # nearly all are empty, and copying is slow


def walk_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every (path, module), also under a second path; not the inside of scripted modules."""
    return zip(*all_modules(root), strict=True)


def all_modules(root: nn.Module) -> tuple[list[str], list[nn.Module]]:
    """The paths and the modules of `walk_modules`."""
    paths, modules = [""], [root]

    def visit(prefix: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return
        for name, child in module.__dict__["_modules"].items():
            if child is None:
                continue
            paths.append(prefix + name)
            modules.append(child)
            if child.__dict__.get("_modules"):
                visit(f"{prefix}{name}.", child)

    if root.__dict__.get("_modules"):
        visit("", root)
    return paths, modules


# --- graphs ------------------------------------------------------------------------------------------------------

Row = tuple[Node, str, str, Any, Any, Any, Any]
"""A node and its name, op, target, args, kwargs and type: what is compared."""


@dataclass(frozen=True, slots=True)
class GraphState:
    """A graph at one moment."""

    graph: Graph
    rows: list[Row]
    metas: list[dict[str, Any]]
    codegen: Any


@dataclass(frozen=True, slots=True)
class WholeGraphState(GraphState):
    """All of a graph, so that `restore_graph` can bring it back, object for object."""

    users: list[tuple[Node, ...]]
    details: list[tuple[Any, Any]]
    """Of each node: sort key, function that shows it."""
    obj_to_name: dict[Any, str]
    used_names: set[str]
    base_counts: dict[str, int]
    insert: Any
    derived: dict[str, Any]
    forward: dict[str, Any]


def rows_of(nodes: Iterable[Node]) -> list[Row]:
    """What nodes are, to be compared."""
    return [(n, n.name, n.op, n.target, n._args, n._kwargs, n.type) for n in nodes]


def graph_state(gm: GraphModule) -> WholeGraphState:
    """What must be kept of a graph so that `restore_graph` can bring it back, object for object."""
    graph = gm.graph
    names = dict(graph._graph_namespace._obj_to_name)
    derived = {k: v for k, v in gm.__dict__.items() if k in _DERIVED}
    forward = {k: v for k, v in vars(type(gm)).items() if k in _GENERATED}
    nodes = list(graph.nodes)
    rows = rows_of(nodes)
    users = [tuple(n.users) for n in nodes]
    details = [(n._sort_key, n._repr_fn) for n in nodes]
    metas = [n.meta.copy() for n in nodes]
    rest = (names, used_names(graph), base_counts(graph), graph._insert, derived, forward)
    return WholeGraphState(graph, rows, metas, graph._codegen, users, details, *rest)


def later_graph_state(gm: GraphModule, before: GraphState) -> GraphState:
    """A graph, only to be compared, at once; nodes that are as they were before have the very row of before."""
    nodes = list(gm.graph.nodes)
    known: Iterable[Row | None] = before.rows
    if nodes != [row[0] for row in before.rows]:
        by_node = {row[0]: row for row in before.rows}
        known = map(by_node.get, nodes)
    rows = []
    for n, row in zip(nodes, known, strict=True):
        same = row is not None and n._args is row[4] and n.target is row[3] and n._kwargs is row[5]
        if row is None or not (same and n.name is row[1] and n.op is row[2] and n.type is row[6]):
            row = (n, n.name, n.op, n.target, n._args, n._kwargs, n.type)
        rows.append(row)
    return GraphState(gm.graph, rows, [n.meta for n in nodes], gm.graph._codegen)


def restore_graph(gm: GraphModule, state: WholeGraphState) -> None:
    """Bring a graph back as it was at `graph_state`, whatever half-done edit it is in. Can be called again."""
    graph = state.graph
    previous = graph._root
    lookup = type(graph._find_nodes_lookup_table)()
    put = object.__setattr__  # past Node's own bookkeeping, which trusts the state that is being replaced
    for row, meta, users, detail in zip(state.rows, state.metas, state.users, state.details, strict=True):
        node, name, op, target, args, kwargs, type_ = row
        sort_key, repr_fn = detail
        fields = {"name": name, "op": op, "target": target, "type": type_, "meta": dict(meta), "graph": graph}
        fields |= {"_args": args, "_kwargs": kwargs, "_input_nodes": _nodes_in(args, kwargs)}
        fields |= {"users": dict.fromkeys(users)}
        fields |= {"_erased": False, "_sort_key": sort_key, "_repr_fn": repr_fn, "_prev": previous}
        for field, value in fields.items():
            put(node, field, value)
        put(previous, "_next", node)
        previous = node
        lookup.insert(node)
    put(previous, "_next", graph._root)
    put(graph._root, "_prev", previous)
    graph._len, graph._find_nodes_lookup_table = len(state.rows), lookup
    graph._codegen, graph._insert = state.codegen, state.insert
    names = graph._graph_namespace
    names._obj_to_name, names._used_names = dict(state.obj_to_name), set(state.used_names)
    names._base_count = dict(state.base_counts)
    graph._owning_module = gm
    for key in [k for k in gm.__dict__ if k in _DERIVED and k not in state.derived]:
        del gm.__dict__[key]
    gm.__dict__.update(state.derived)
    for key, value in state.forward.items():
        setattr(type(gm), key, value)
    for key in vars(type(gm)).keys() & set(_GENERATED) - state.forward.keys():
        delattr(type(gm), key)  # FSDP puts a class of its own before the graph's, which has none at first


def _nodes_in(args: Any, kwargs: Any) -> dict[Node, None]:
    """The nodes among arguments, in the order in which torch notes them."""
    found: dict[Node, None] = {}

    def note(node: Node) -> Node:
        found.setdefault(node)
        return node

    map_arg(args, note)
    map_arg(kwargs, note)
    return found


def codegen(graph: Graph) -> Any:
    """The code generator of a graph (exported graphs carry their pytree specs there)."""
    return graph._codegen


def set_codegen(graph: Graph, generator: Any) -> None:
    """Install a code generator."""
    graph._codegen = generator


def base_counts(graph: Graph) -> dict[str, int]:
    """The counters from which new node names are made."""
    return dict(graph._graph_namespace._base_count)


def set_base_counts(graph: Graph, counts: dict[str, int]) -> None:
    """Put the counters for new node names back."""
    graph._graph_namespace._base_count = dict(counts)


def used_names(graph: Graph) -> set[str]:
    """Every name that is taken, also by nodes that were erased."""
    return set(graph._graph_namespace._used_names)


def reserve_names(graph: Graph, names: Iterable[str]) -> None:
    """Take names, as nodes do that were erased."""
    graph._graph_namespace._used_names |= set(names)


def free_names(graph: Graph, names: Iterable[str]) -> None:
    """Give names of erased nodes free again."""
    taken = {node.name for node in graph.nodes}
    graph._graph_namespace._used_names -= set(names) - taken


def rename_nodes(graph: Graph, names: list[str]) -> None:
    """Give every node, in order, a name of a list; other names that were taken become free."""
    namespace = graph._graph_namespace
    namespace._obj_to_name = {}
    namespace._used_names = set(names)
    for node, name in zip(graph.nodes, names, strict=True):
        node.name = name
        namespace._obj_to_name[node] = name


def is_erased(node: Node) -> bool:
    """Whether a node was taken out of its graph."""
    return node._erased


def graph_order(nodes: list[Node]) -> dict[Node, int]:
    """The place of every node."""
    return dict(zip(nodes, range(len(nodes)), strict=True))


def sort_users(graph: Graph) -> None:
    """Put every node's users in graph order, the order in which a trace makes them."""
    order = graph_order(list(graph.nodes))
    for node in [node for node in order if len(node.users) > 1]:
        places = [*map(order.__getitem__, node.users)]
        if places != sorted(places):
            node.users = dict.fromkeys(sorted(node.users, key=order.__getitem__))


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Those of the given arguments that an ATen operator writes into."""
    schema = op._schema
    if not schema.is_mutable:
        return []
    given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
    return [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def returns_alias(op: Any) -> bool:
    """Whether an ATen operator says that it returns its argument or a view of it."""
    return any(r.alias_info is not None for r in op._schema.returns)


_NO_MEMORY = (RuntimeError, NotImplementedError, ValueError)
"""What torch raises where a tensor is asked for its memory and has none; ValueError for lazy parameters."""


def addresses_of(tensors: list[torch.Tensor]) -> list[int | None]:
    """The addresses of tensors."""
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except (*_NO_MEMORY, TypeError):
        return list(map(address_of, tensors))


def address_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's first element; None for tensors that have none."""
    try:
        return tensor.data_ptr()
    except _NO_MEMORY:
        return None


def storage_of(tensor: torch.Tensor) -> int | None:
    """The address of the memory that a tensor is a part of; None for tensors that have none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except _NO_MEMORY:
        return None


def extent_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """The bytes that a tensor lies in: a storage where it has no address, else 0; the first byte and the last. None for
    a tensor that has no memory."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        storage = tensor.untyped_storage()
        start, last = (place * tensor.element_size() for place in span_of(tensor))
    except _NO_MEMORY:
        return None
    if not tensor.numel():
        return None
    address = storage_of(tensor) or 0
    return (0 if address else int(storage._cdata)), address + start, address + last + tensor.element_size() - 1


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last element of its memory that a tensor uses."""
    start = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + int(sum((size - 1) * stride for size, stride in steps))


def version_of(tensor: torch.Tensor) -> int | None:
    """The in-place counter of a tensor; None for tensors that do not keep one."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode
        return None


def versions_of(tensors: list[torch.Tensor]) -> list[int | None]:
    """The in-place counters of many tensors; every call of an optimized model reads them, so it is quick."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]


_transforms = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
_trace = getattr(torch._C, "_get_tracing_state", lambda: None)
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


is_autocast_on = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast is on for any kind of device, or torch does not say."""


def is_plain() -> bool:
    """Whether operations just compute here: nothing observes them, and there is no autocast. It is asked at every call
    of an optimized model, so it is quick, and one question. To dynamo, every answer of torch's is something."""
    if _transforms() is None and _trace() is None and not _modes() and not is_autocast_on():
        return forward_ad._current_level < 0
    return False


def is_observed() -> bool:
    """Whether operations do more here than compute: a transform of torch.func (vmap, grad, jvp), forward-mode
    differentiation, a trace of torch.jit, or a mode that sees every operation (make_fx, a counter of them)."""
    if forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_dynamo_compiling():
        return False
    return _transforms() is not None or _trace() is not None or bool(_modes())


raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""The current stream of a CUDA device, as a number: torch.cuda makes an object of it every time."""


def tracer_class(gm: GraphModule) -> Any:
    """The class of the tracer that made a module's graph; pickling uses it again."""
    return gm.graph._tracer_cls or getattr(gm, "_tracer_cls", None)


def retrace_as_pickle_does(gm: GraphModule) -> GraphModule:
    """What a module becomes by pickling and unpickling, without copying a weight."""
    rebuild, arguments = gm.__reduce__()[:2]
    body = {k: dict(v) if k in TABLES else v for k, v in arguments[0].items()}
    again: GraphModule = rebuild(body, *arguments[1:])
    return again


def join_path(path: str, key: str) -> str:
    """The full name of an entry of the module at a path."""
    return f"{path}.{key}" if path else key


def tensor_places(root: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(full name, table, key) of every parameter and buffer, also under a second name; not of scripted modules."""
    for path, module in walk_modules(root):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for entries in (table(module, "_parameters"), table(module, "_buffers")):
            for key in [k for k, tensor in entries.items() if tensor is not None]:
                yield join_path(path, key), entries, key


def equal_sizes_apart() -> AbstractContextManager[Any]:
    """Code that is compiled inside does not take sizes for the same because they are equal in the first call."""
    import torch.fx.experimental._config as config

    symbolic: Any = config
    return symbolic.patch(use_duck_shape=False) if hasattr(symbolic, "use_duck_shape") else nullcontext()


def no_values() -> AbstractContextManager[Any]:
    """Inside, tensors are made and computed without numbers in them: sizes, dtypes and devices alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def named_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its full name, also under a second name."""
    return {name: table[key] for name, table, key in tensor_places(root)}


def registered_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, then every buffer, by its full name, also under a second name; those of scripted modules too."""
    return dict((*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)))


def parameter_over(values: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter of these values; those that were made in inference mode can only be wrapped there."""
    with torch.inference_mode(values.is_inference()):
        return nn.Parameter(values, requires_grad=requires_grad)


def find_tensor(gm: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter or buffer of a full name; none of a scripted module."""
    path, _, key = name.rpartition(".")
    try:
        module = gm.get_submodule(path)
    except AttributeError:
        return None
    if isinstance(module, torch.jit.ScriptModule):
        return None
    found = table(module, "_parameters").get(key)
    return found if found is not None else table(module, "_buffers").get(key)


# --- FSDP2: the parameters that a group of modules gathers ----------------------------------------------------------


_FSDP_PARAMETERS = "torch.distributed.fsdp._fully_shard._fsdp_param"
"""Where hooks on the state of modules come from; those of groups of parameters from a module whose name begins so."""


def fsdp_groups(module: Any) -> list[Any]:
    """The groups of parameters that `fully_shard` made for a module."""
    groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    return groups


def class_before_fsdp(module: Any) -> type[nn.Module]:
    """The class of a module before `fully_shard` put one of its own before it."""
    found: type[nn.Module] = type(module).__mro__[module._orig_cls_mro_index]
    return found


def fsdp_place(managed: Any) -> tuple[int, str]:
    """The module, by its id, and the name under which a managed parameter is registered."""
    return id(managed._module_info.module), managed._module_info.param_name


def fsdp_owner(hook: Any) -> Any:
    """The managed parameter that put a hook onto the module that holds it; None for all other hooks."""
    if getattr(hook, "__module__", "") != _FSDP_PARAMETERS:
        return None
    return hook.__closure__[0].cell_contents


def hook_states_again(group: Any) -> None:
    """Let FSDP hook onto the states of the modules whose parameters a group manages now, if it did before."""
    handles = (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle)
    if handles[0]:
        for handle in (*handles[0].values(), *handles[1].values()):
            handle.remove()
        for known in handles:
            known.clear()
        group._register_state_dict_hooks()


def forget_fsdp_hooks(module: nn.Module) -> None:
    """Leave the hooks of managed parameters out of a module that shares its attributes with another one."""
    hooks = module._load_state_dict_post_hooks
    module.__dict__["_load_state_dict_post_hooks"] = hooks.copy()
    remove_fsdp_hooks(module, [])


def remove_fsdp_hooks(module: nn.Module, live: list[Any]) -> None:
    """Remove the hooks of managed parameters that are none of the live ones."""
    hooks = module._load_state_dict_post_hooks
    for key in [k for k, hook in hooks.items() if fsdp_owner(hook) and not any(fsdp_owner(hook) is p for p in live)]:
        del hooks[key]


def fsdp_param(group: Any, entries: list[tuple[nn.Module, str, Any]]) -> Any:
    """What a group needs to know about a parameter that lies sharded in modules already, under these names."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo

    tensor = entries[0][2]
    like = nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad)
    placement = next(p for p in tensor.placements if p.is_shard())
    settings = (group.mesh_info, group.post_forward_mesh_info, group.device, lambda _: placement)
    others = [module for module, _, _ in entries[1:]], [key for _, key, _ in entries[1:]]
    place = ParamModuleInfo(*entries[0][:2], *others)
    made = FSDPParam(like, place, *settings, group.mp_policy, group.offload_policy)
    for module, key, _ in entries:
        table(module, "_parameters")[key] = tensor
    made.reset_sharded_param()
    return made
