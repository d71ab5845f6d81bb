"""Carries random trainings out on one worker. random_training_worker.py SHAPE FOLDER SEED,SEED,... [KIND]"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import random_trainings
import torch
from training_averages import Averages
from training_loops import Loops
from training_rules import Rules

KINDS = {"rules": Rules, "loops": Loops, "averages": Averages}


def main() -> None:
    shape, folder, seeds, kind = sys.argv[1:5]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    me = int(os.environ.get("KVMPI_RANK", "0"))
    for seed in map(int, seeds.split(",")):
        made = random_trainings.program(seed, shape, kind)
        print(f"program {seed} begins", flush=True)
        try:
            training = KINDS[made.kind](made, random_trainings.clients_of(shape), me, Path(folder))
            training.run()
        except BaseException:
            traceback.print_exc()
            print(f"program {seed} on worker {me}: {made}", file=sys.stderr, flush=True)
            if "--go-on" not in sys.argv:
                os._exit(1)
        print(f"program {seed} right", flush=True)


main()
