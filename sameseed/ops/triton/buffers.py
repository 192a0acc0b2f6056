"""Fixed device buffers for the batches of a recorded graph, filled by one copy per pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sameseed import devices
from sameseed.batch import Batch, Draws, Steps


def _sizes(rows: int, seqs: int, width: int, drawn: bool) -> dict[str, int]:
    """Sizes of the parts of a batch, in int32. Parts that differ between passes of a chain are kept adjacent."""
    names = ("positions", "slots", "logit_rows", "key_positions")
    long = ("keys", "divisors", "floors") if drawn else ()
    sizes = {"token_ids": rows, "row_offsets": seqs + 1, "num_pending": seqs, "kv_lens": seqs}
    sizes |= {**dict.fromkeys(names, rows), "tree_mask": 2 * rows}
    sizes |= {**dict.fromkeys(long, 2 * rows), **({"greedy": rows} if drawn else {}), "late_rows": 2 * rows}
    return {**sizes, "block_tables": seqs * width}


class Buffers:
    """A batch of `rows` rows of `seqs` sequences with block tables of `width` columns, at fixed device addresses.

    The buffers can also hold the batches of a chain of passes. The parts that differ are stored for every pass. Each
    pass writes tokens and inputs for the next one. The `choices` of a chain are int32 [most_steps, 1 or 2, rows].
    """

    def __init__(
        self,
        rows: int,
        seqs: int,
        width: int,
        draws: Draws | None,
        widths: Seq[int],
        device: torch.device,
        most_steps: int = 0,
    ) -> None:
        """`draws`: how tokens of such a pass are drawn. `widths`: widths of the inputs [T, width] besides the batch."""
        self.width, self._starts, end = width, {}, 0
        for name, size in (sizes := _sizes(rows, seqs, width, draws is not None)).items():
            self._starts[name], end = end, end + size + -size % 4  # each at a multiple of 16 bytes
        self._differs, self._steps_at = slice(self._starts["row_offsets"], self._starts["block_tables"]), end
        end += most_steps * (self._differs.stop - self._differs.start)
        self._host, self._there = np.zeros(end, np.int32), torch.zeros(end, dtype=torch.int32, device=device)
        kinds = dict.fromkeys(("tree_mask", "keys", "late_rows"), torch.int64)
        kinds |= dict.fromkeys(("divisors", "floors"), torch.float64)
        self._parts: dict[str, NDArray[Any]] = {}
        there: dict[str, Any] = {}
        for name, start in self._starts.items():
            part, kind = slice(start, start + sizes[name]), kinds.get(name, torch.int32)
            there[name] = self._there[part].view(kind)
            self._parts[name] = torch.from_numpy(self._host)[part].view(kind).numpy()
        self._late_rows = there.pop("late_rows")
        there["block_tables"] = there["block_tables"].view(seqs, width)
        drawn, nothing = None, torch.zeros(2, 0, dtype=torch.int64, device=device)
        if draws is not None:
            keys, divisors, floors, greedy = (there.pop(name) for name in ("keys", "divisors", "floors", "greedy"))
            drawn = Draws(keys, divisors, floors, greedy, nothing, 0, (), draws.sure)
        self.batch = Batch(**there, draws=drawn)
        self.inputs = [torch.zeros(rows, w, dtype=torch.float32, device=device) for w in widths]
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._of_step = self._there[self._differs].view(1, -1)
        self._of_steps = self._there[self._steps_at :].view(-1, self._of_step.shape[1])
        outputs = 2 if drawn is not None and drawn.sure else 1
        self.choices = torch.zeros(most_steps, outputs, rows, dtype=torch.int32, device=device)

    def fill(self, batch: Batch, inputs: Seq[Tensor]) -> None:
        """Copy a batch from the CPU to the buffers by one copy; the remaining rows belong to no sequence."""
        self._lay_out(batch)
        # Later rows of the block tables need no update, because no sequence reads them.
        self._send(self._starts["block_tables"] + batch.num_seqs * self.width, batch, inputs)

    def _lay_out(self, batch: Batch) -> None:
        rows = batch.num_rows
        given: dict[str, Tensor | None] = {name: x for name, x in vars(batch).items() if name != "draws"}
        given["key_positions"] = batch.positions if batch.key_positions is None else batch.key_positions
        if self.batch.draws is not None and batch.draws is not None:
            given |= {name: getattr(batch.draws, name) for name in ("keys", "divisors", "floors", "greedy")}
        behind = {"slots": -1, "row_offsets": rows, "divisors": 1, "greedy": 1}
        for name, part in self._parts.items():
            x = given[name]
            if name == "block_tables":
                table = batch.block_tables.numpy()
                part.reshape(-1, self.width)[: len(table), : table.shape[1]] = table
                continue
            size = 0 if x is None else len(x)
            if x is not None:
                part[:size] = x.numpy()
            part[size:] = behind.get(name, 0)

    def _send(self, end: int, batch: Batch, inputs: Seq[Tensor]) -> None:
        devices.put_into(self._there[:end], torch.from_numpy(self._host[:end].copy()))
        if batch.late is not None:
            self.batch.token_ids.index_copy_(0, self._late_rows[: len(batch.late)], batch.late)
        for buffer, given_input in zip(self.inputs, inputs, strict=True):
            buffer[: batch.num_rows].copy_(given_input)

    def fill_steps(self, batch: Batch, inputs: Seq[Tensor], steps: Steps) -> None:
        """Fill in the first pass of a chain (one row per sequence) and the differences of all passes by one copy."""
        self._lay_out(batch)
        count = len(steps.slots)
        end = self._steps_at + count * self._of_step.shape[1]
        every = self._host[self._steps_at : end].reshape(count, -1)
        every[:] = self._host[self._differs]
        ahead = (np.cumsum(steps.slots >= 0, axis=0) - 1).astype(np.int32)  # number of rows since the first one
        for name in ("positions", "key_positions", "kv_lens"):
            self._part(every, name, batch.num_rows)[:] += ahead
        self._part(every, "slots", batch.num_rows)[:] = steps.slots
        self._part(every, "keys", 2 * batch.num_rows)[:] = steps.keys.view(np.int32)
        self._step.zero_()
        self._send(end, batch, inputs)

    def _part(self, every: NDArray[np.int32], name: str, size: int) -> NDArray[np.int32]:
        """A view of the first `size` numbers of part `name`, for all passes."""
        start = self._starts[name] - self._differs.start
        return every[:, start : start + size]

    def take(self) -> None:
        """Copy the parts that differ in the next pass to the batch. Its tokens and inputs are there already."""
        torch.index_select(self._of_steps, 0, self._step, out=self._of_step)

    def keep(self, hidden: Tensor | None, chosen: Tensor | None) -> None:
        """Save the choices of a pass for the host; copy them and the hidden states to the inputs of the next pass.

        Raises RuntimeError if the device chooses no tokens.
        """
        if chosen is None:
            raise RuntimeError("the device chooses no tokens")
        chosen = chosen.reshape(1, -1, self.choices.shape[-1])
        self.choices.index_copy_(0, self._step, chosen)
        torch.clamp(chosen[0, 0], min=0, out=self.batch.token_ids)  # after FAILED (-1) any token is fine
        for buffer in self.inputs:
            assert hidden is not None
            buffer.copy_(hidden)
        self._step += 1
