"""What a benchmark measures, and how it judges and shows it: nothing is started here."""

from __future__ import annotations

import contextlib
import io
from math import inf, prod

import numpy as np
import pytest

from kvmpi.arrays import DTYPES
from kvmpi.benchmarks import command, options, rows
from kvmpi.benchmarks.collective_report import COLUMNS, about_auto, about_cores, table_of
from kvmpi.benchmarks.limits import link_limit, memory_limit
from kvmpi.benchmarks.peers import _buckets
from kvmpi.benchmarks.plan import OPS, Case, Plan, RowName
from kvmpi.benchmarks.sizes import default_counts, format_bytes, parse_bytes, parse_sizes
from kvmpi.benchmarks.verify import Pattern, poison
from kvmpi.planner.presets import PRESETS

# ---- presets and sizes


@pytest.mark.parametrize(
    ("name", "num_arrays", "num_parameters"), [("resnet50", 161, 25_557_032), ("gpt-small", 148, 124_439_808)]
)
def test_presets_have_the_published_numbers_of_parameters(name, num_arrays, num_parameters):
    shapes = PRESETS[name]()
    assert len(shapes) == num_arrays
    assert sum(map(prod, shapes)) == num_parameters


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4", 4), ("4099", 4099), ("64K", 65536), ("1m", 1 << 20), ("2G", 2 << 30), ("3KiB", 3072), ("8B", 8)],
)
def test_sizes_are_read_in_powers_of_1024(text, nbytes):
    assert parse_bytes(text) == nbytes


def test_sizes_are_shown_in_powers_of_1024():
    assert [format_bytes(n) for n in (0, 1000, 4096, 5864484, 2 << 30)] == [
        "0 B",
        "1000 B",
        "4 KiB",
        "5.6 MiB",
        "2 GiB",
    ]


@pytest.mark.parametrize("text", ["", "x", "4X", "-1", "1.5M", "K", "4 5"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


def test_sizes_become_whole_elements_but_not_none():
    assert parse_sizes("0,4,4099,64K", 4) == [0, 1, 1024, 16384]
    assert parse_sizes("0,4,12", 8) == [0, 1, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
def test_default_sizes_have_what_nothing_divides(num_ranks):
    counts = default_counts(num_ranks, 4)
    assert {0, 1, 1211 * 1211, (256 << 20) // 4} <= set(counts)
    assert counts == sorted(set(counts))
    assert num_ranks == 1 or any(count > num_ranks and count % num_ranks == 1 for count in counts)
    assert max(default_counts(num_ranks, 4, large=True)) * 4 > 2 << 30
    assert {1 << bits for bits in range(27)} <= set(default_counts(num_ranks, 4, dense=True))


# ---- verification


@pytest.mark.parametrize("num_terms", [1, 2, 5, 32])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_sums_of_the_pattern_are_exact_and_a_mistake_shows(dtype, num_terms):
    count, start = 70_001, 17
    pattern = Pattern(dtype, num_terms)
    terms = [np.empty(count, DTYPES[dtype]) for _ in range(num_terms)]
    for i, term in enumerate(terms):
        pattern.fill(term, start, i)
    numbers = [(t.astype("u4") << 16).view("f4") if dtype == "bfloat16" else t.astype("f8") for t in terms]
    exact = np.sum(numbers, axis=0)
    total = (exact.astype("f4").view("u4") >> 16).astype("u2") if dtype == "bfloat16" else exact.astype(DTYPES[dtype])
    everybody = range(num_terms)
    assert pattern.wrong(total, start, everybody) == 0
    assert pattern.wrong(np.roll(total, 4096), start, everybody) > count // 4
    spoiled = total.copy()
    spoiled[[0, count // 2, count - 1]] = spoiled[1:2] + 1 if dtype != "bfloat16" else 0x7F80
    assert 1 <= pattern.wrong(spoiled, start, everybody) <= 3
    poison(spoiled)
    assert pattern.wrong(spoiled, start, everybody) > count // 2
    if num_terms > 1:
        twice = range(num_terms - 1)
        assert pattern.wrong(total, start, twice) > 0


# ---- rows and options


def parsed(op, text):
    return options.parse(op, text.split())


def test_every_operation_has_kvmpis_algorithms_and_the_peers():
    for op in OPS:
        labels = [row.label for row in rows.default(op, preset=False, mpich=True)]
        assert labels[0] == "auto"
        assert {"shared", "ring", rows.MPI_CALLS[op], "gloo", "MPICH"} <= set(labels)
        assert ("store" in labels) == ("baidu" in labels) == (op == "allreduce")
    assert {"store:empty", "gloo:bucket"} <= {row.label for row in rows.default("allreduce", preset=True, mpich=False)}


def test_auto_alone_brings_what_it_can_choose_from():
    labels = [row.label for row in rows.parse("auto:in", "allreduce")]
    assert {"auto:in", "shared:in", "ring:in"} <= set(labels)
    assert "naive:in" not in labels
    assert [row.label for row in rows.parse("auto,ring", "allreduce")] == ["auto", "ring"]


@pytest.mark.parametrize(
    ("op", "text", "words"),
    [
        ("allreduce", "--algorithms fast", "unknown row 'fast'; known for allreduce: auto, "),
        ("allgather", "--algorithms baidu", "unknown row 'baidu'"),
        ("allreduce", "--algorithms ring:upside", "ring has no 'upside'; known: in, empty, view"),
        ("broadcast", "--algorithms ring:in", "ring has no 'in'"),
        ("allreduce", "--sizes 4X", "'4X' is no size"),
        ("allreduce", "--sizes ,", "no sizes given"),
        ("allreduce", "--ranks 2,x", "-n 2,x"),
        ("allreduce", "--vectors 9", "--vectors 9: expected 1 to 8"),
        ("allreduce", "--rings 0", "--rings 0: expected 1 to 8"),
        ("allreduce", "--chunk 99999999999G", "--chunk 99999999999G: expected less than 2^62 bytes"),
        ("allreduce", "--seconds 0", "a positive number of seconds"),
        ("allreduce", "--preset resnet50 --large", "a preset has its own"),
        ("allreduce", "--preset resnet50 --sizes 4", "not allowed with"),
        ("allreduce", "--link 1gbit", "say how many with --hosts"),
        ("allreduce", "--hosts 2 -n 4", "instead of -n"),
        ("allreduce", "--plot picture.txt", "expected a name that ends in .png"),
        ("broadcast", "--vectors 2", "unrecognized arguments"),
    ],
)
def test_a_bad_option_is_named(op, text, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(op, text)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_rows_of_the_library_are_named_after_how_its_ranks_wait():
    def labels(text):
        return [row.label for row in options.wanted_rows(parsed("allreduce", text), mpich=False)]

    assert "MPI_Allreduce" in labels("")
    assert "MPI_Allreduce:spin" not in labels("")
    assert {"MPI_Allreduce", "MPI_Allreduce:spin"} <= set(labels("--yield both"))
    assert "MPI_Allreduce" not in labels("--yield off")
    assert labels("--algorithms ring,MPI_Allreduce --yield off") == ["ring", "MPI_Allreduce:spin"]


def test_a_plan_survives_its_journey_to_the_ranks():
    plan = Plan("allreduce", (Case((1, 2), "some"), Case((0,))), (RowName.parse("shared:in:empty"),), num_ranks=3)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.rows[0] == RowName("shared:in:empty", "shared", ("in", "empty"))


def test_help_lists_what_there_is(capsys):
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    for name in command.BENCHMARKS:
        assert f"\n    {name}" in listed
        with contextlib.redirect_stdout(io.StringIO()) as helped, pytest.raises(SystemExit) as ended:
            command.main([name, "--help"])
        assert ended.value.code == 0
        assert f"kvmpi bench {name}" in helped.getvalue()


def test_buckets_hold_every_array_once_and_no_more_than_25_mib():
    arrays = [np.full(prod(shape), i, "f4") for i, shape in enumerate(PRESETS["resnet50"]())]
    found = _buckets(arrays)
    assert [array[0] for _, parts in found for array, _ in parts] == list(reversed(range(161)))
    assert 4 <= len(found) <= 6
    for bucket, parts in found:
        assert bucket.nbytes <= 25 << 20
        for array, place in parts:
            place[:] = array
        np.testing.assert_array_equal(bucket, np.concatenate([array for array, _ in parts]))


# ---- the table and the limits


def row(algo="ring", **values):
    found = {
        "size_B": 4096, "count": 1024, "dtype": "float32", "op": "allreduce", "algo": algo, "ranks": 2,
        "chunk_B": 524288, "t_min": 1.0, "t_p50": 2.0, "t_p99": 30.0, "t_max": 40.0, "algbw": 1.5, "busbw": 1.5,
        "iters": 10, "wrong": 0,
    }  # fmt: skip
    return found | values


def test_lines_of_a_table_line_up():
    long = "MPI_Reduce_scatter:empty"
    shown = table_of("reduce_scatter", "bfloat16", ["ring", long])
    small = shown.line(row(dtype="bfloat16", op="reduce_scatter", chunk_B=None))
    large = shown.line(
        row(long, dtype="bfloat16", op="reduce_scatter", size_B=2147483652, count=536870913, t_max=3322511.7, wrong=512)
    )
    header = shown.header()
    assert header.split() == list(COLUMNS)
    assert len(small.split()) == len(large.split()) == len(COLUMNS)
    assert len(header) == len(small) == len(large)
    for name in ("t_p50", "busbw", "wrong"):
        end = header.index(name) + len(name)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in (small, large))


def test_what_auto_took_is_compared_with_the_best_of_its_kind():
    measured = [
        row("auto", choice="shared", t_p50=2.0), row("shared", t_p50=2.1), row("ring", t_p50=1.9),
        row("MPI_Allreduce", t_p50=0.1), row("shared:in", t_p50=0.5),
    ]  # fmt: skip
    sentences = about_auto(measured, ["auto", "shared", "ring"])
    assert sentences == ["auto took shared; best was ring: within 6 %"]
    assert measured[0]["best"] == "ring"
    measured[0]["t_p50"] = 1.0
    sentences = about_auto(measured, ["auto", "shared", "ring"])
    assert sentences == ["auto took shared; best was shared: within 0 %"]


def test_cores_that_have_moved_between_rows_are_told_of() -> None:
    rows = [{"word_ns_min": 95.0, "word_ns_max": 110.0}, {}, {"word_ns_min": 100.0, "word_ns_max": 189.0}]
    assert about_cores([]) == about_cores([{}]) == about_cores(rows) == []
    [sentence] = about_cores([*rows, {"word_ns_min": 94.6, "word_ns_max": 412.3}])
    assert "the cores have moved: a word took 95 to 412 ns from one to another and back" in sentence


def test_limits():
    memory = {"copy": 6.0, "add": 5.0}  # 15 GB/s touched by additions
    assert memory_limit("allreduce", 4, memory) == pytest.approx(15 / 5 * 1.5)
    assert memory_limit("allreduce", 4, memory, each=True) == pytest.approx(15 / 8 * 1.5)
    assert memory_limit("broadcast", 3, memory, each=True) == pytest.approx(15 / 3)
    assert link_limit("allreduce", 4, 4, 0.125) == pytest.approx(0.125)
    assert link_limit("allgather", 8, 4, 0.125) == pytest.approx(0.125 * (7 / 8) / (3 / 4))
    assert link_limit("broadcast", 8, 4, 0.125) == pytest.approx(0.125)
    assert link_limit("allreduce", 4, 1, 0.125) == inf
