"""``kvmpi bench`` with one more row for ``ps``, whose last worker pulls an element that is off by one."""

from __future__ import annotations

import os
import sys

from kvmpi.benchmarks import command, ps_rows, ps_worker


class Liar(ps_worker.Kvmpi):
    def open(self, values, outs):
        super().open(values, outs)
        self._last = outs[-1]

    def read(self):
        if os.environ["KVMPI_RANK"] == "1" and self._last.size >= 2:
            self._last[-2] += 1


ps_rows.KINDS["liar"] = ps_rows.Way(worker=(__file__,))

if __name__ == "__main__":
    if "KVMPI_RANK" in os.environ:
        ps_worker.SYSTEMS["kvmpi"] = Liar
        sys.exit(ps_worker.main(sys.argv[1]))
    sys.exit(command.main(sys.argv[1:]))
