"""Worker 0 starts a process that makes a store of the same job, beside its own or when that is closed."""

import multiprocessing
import sys

import numpy as np

import kvmpi

ANSWER_S = 120.0


def total(store_type: str, key: str) -> float:
    with kvmpi.create(store_type) as kv:
        kv.init(key, np.zeros(3, "float32"))
        kv.push(key, np.full(3, kv.rank + 1, "float32"))
        kv.pull(key, found := np.empty(3, "float32"))
        return float(found[1])


def child(store_type: str, answers: multiprocessing.SimpleQueue) -> None:
    try:
        answers.put(total(store_type, "of the child"))
    except Exception as error:
        answers.put(f"{type(error).__name__}: {error}")


def answer_of_child(store_type: str, method: str) -> object:
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(store_type, answers))
    process.start()
    answer = answers.get()
    process.join(ANSWER_S)
    return answer


if __name__ == "__main__":
    store_type, method, when = sys.argv[1:]
    if when == "after":
        assert total(store_type, "of the parent") == 3.0
        print(f"child: {answer_of_child(store_type, method)}")
    else:
        with kvmpi.create(store_type) as kv:
            kv.init("w", np.zeros(3, "float32"))
            if kv.rank == 0:
                print(f"child: {answer_of_child(store_type, method)}")
            kv.barrier()
            kv.push("w", np.full(3, kv.rank + 1, "float32"))
            kv.pull("w", found := np.empty(3, "float32"))
            print(f"sum {found[1]}")
