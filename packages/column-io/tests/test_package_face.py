"""The package's public names and what it leans on."""

from __future__ import annotations

import ast
from pathlib import Path

import column_io

SOURCE = Path(column_io.__file__).parent
OURS = {"dataplane_tq", "rollout_actor", "observability", "refit_mx", "grpo_trainer"}


def test_the_public_names_are_those_of_the_contract() -> None:
    assert set(column_io.__all__) == {
        "MESSAGE_LOG_BULK_FIELDS",
        "TOKEN_ALIGNED_FIELDS",
        "BatchedDataDict",
        "DynamicBatchingArgs",
        "SequencePackingArgs",
        "attach_message_log_view",
        "decompose_message_log",
        "kv_first_write",
        "materialize",
        "pack_jagged_fields",
        "pack_per_token_field",
        "read_columns",
        "reconstruct_message_log",
        "response_from_nested",
        "round_up",
        "shard_meta_for_dp",
        "to_nested_by_length",
        "write_columns",
    }
    assert all(hasattr(column_io, name) for name in column_io.__all__)


def test_every_public_name_says_what_it_is() -> None:
    functions = [getattr(column_io, name) for name in column_io.__all__]
    assert all(thing.__doc__ for thing in functions if callable(thing))


def test_imports_point_to_the_core_only() -> None:
    imported = set()
    for module in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert not imported & (OURS | {"ray", "transfer_queue"})
