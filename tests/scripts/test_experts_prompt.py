"""The benchmark of prompts through few experts: its emulated link, as far as no GPU is needed, and its table."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from scripts import bench_tables, experts_prompt
from scripts.experts_prompt import Passed, emulated, file_name, forget_rates, row_of, timed
from tests.layers.experts.beside_gpu import wrap_beside
from tests.layers.experts.test_device_cache import interpreted
from tests.layers.experts.test_prompt_ring import made, passed
from tests.scripts.test_experts_decode import CPU, TINY
from vbrt.layers.experts import missed_experts, prompt_ring
from vbrt.residency.miss_policy import MissRates

RATES = MissRates(link_bytes_s=50e9, cpu_bytes_s=10e9, host_s=1e-4)


def tiny(monkeypatch, miss):
    model = experts_prompt.build(2, CPU, **TINY)
    vb = wrap_beside(monkeypatch, model, room=4, miss=miss)
    return vb, torch.randint(0, 64, (1, 8))


@pytest.mark.parametrize("copies", [1, 3])
def test_each_page_passes_the_ring_so_many_times(monkeypatch, copies):
    seen, copy = [], prompt_ring.copy_pages

    def counted(slots, pages, stream):
        seen.extend(bytes(page.bytes.numpy()) for of in pages for page in of)
        copy(slots, pages, stream)

    monkeypatch.setattr(prompt_ring, "copy_pages", counted)
    ring, memory, _order = made()
    with emulated(copies) as link:
        passed(ring, memory, 1, [0, 1, 2, 5, 7])  # which compares bytes
    assert link == Passed(copied=5) and len(seen) == 2 * 5 * copies  # two planes each
    assert {seen.count(page) for page in seen} == {copies}
    assert prompt_ring.copy_pages is counted


def test_a_second_prompt_through_a_device_cache_is_slowed_and_a_first_one_fills_slots_by_kernels():
    printed = interpreted("""
        from scripts.experts_prompt import emulated
        from vbrt.layers.experts import prompt_ring
        residency._PROGRAMS, copy, copied = 1, prompt_ring.copy_pages, []
        def count(slots, pages, stream):
            copied.extend(page.address for of in pages for page in of)
            copy(slots, pages, stream)
        prompt_ring.copy_pages = count
        cache, ids = Experts(torch.device("cpu"), (12, 12), (1, 1)).cache(9), torch.arange(12).view(4, 3)
        def prompt():
            for layer in range(2):
                cache.pass_through(layer, ids, lambda part: None, 12)
        with emulated(2) as link:
            prompt()
            print(link.copied + link.leased, link.leased > 0)
            copied.clear()
            before = link.copied
            with link.all_slowed():
                prompt()
            print(link.copied - before > 0, len(copied) == 2 * (link.copied - before))
            print({copied.count(page) for page in copied} == {2})
    """)
    assert printed == ["24", *["True"] * 4]


def test_prompts_that_the_emulation_does_not_slow_are_refused(monkeypatch):
    link = Passed(copied=3, leased=4)
    with pytest.raises(RuntimeError, match="no page came through"), link.all_slowed():
        pass
    with pytest.raises(RuntimeError, match="2 experts did not come"), link.all_slowed():
        link.copied, link.leased = 8, 6
    vb, ids = tiny(monkeypatch, "fetch")  # the host decides, and leases
    with torch.no_grad(), emulated(2) as link:
        want = experts_prompt.logits_of(vb, ids)
        seconds, same = timed(vb, ids, want, None)
        assert seconds > 0 and same
        assert not timed(vb, ids, want + 1, None)[1]
        with pytest.raises(RuntimeError, match="no page came through"):
            timed(vb, ids, want, link)
    vb.close()


@torch.no_grad()
def test_what_divides_misses_by_rates_is_told_the_emulated_one(monkeypatch):
    monkeypatch.setattr(missed_experts, "measured_rates", lambda *args: RATES)
    vb, _ = tiny(monkeypatch, "auto")

    def miss():
        for token in range(16):  # the upper memory has room for 4 experts of the 16
            vb(input_ids=torch.tensor([[token]]), use_cache=False)

    miss()
    assert vb._attachment.missed.rates == RATES
    with emulated(4):
        forget_rates(vb)
        miss()
    assert vb._attachment.missed.rates == MissRates(link_bytes_s=12.5e9, cpu_bytes_s=10e9, host_s=1e-4)
    vb.close()


def test_a_row_compares_with_the_link_divided_by_the_copies():
    row = row_of(0.3, 0.15, 5_000_000_000, 50e9, 2)
    assert row == {"copies": 2} | {k: pytest.approx(row[k]) for k in row if k != "copies"}
    assert row["link_ms"] == pytest.approx(200) and row["of_limit"] == pytest.approx(1.5)
    assert row_of(0.3, 0.15, 5_000_000_000, 50e9, 1)["of_limit"] == pytest.approx(2)  # of the resident prompt
    assert file_name("h", [1]) == "experts-prompt-h.json"
    assert file_name("h", [1, 2]) == "experts-prompt-emulated-h.json"


def test_the_table_names_the_link_where_one_is_emulated(tmp_path):
    (path,) = bench_tables.RESULTS.glob("experts-prompt-nvidia-h200.json")
    plain = "\n".join(bench_tables.prompt_table(path))
    assert plain in bench_tables.DOCS.read_text() and "mulated" not in plain
    result = json.loads(path.read_text())
    for row, copies in zip(result["rows"], (1, 2, 4), strict=False):
        row |= row_of(row["ms"] / 1e3, row["resident_ms"] / 1e3, 10**9, 50e9, copies)
    other = tmp_path / "experts-prompt-emulated-nvidia-h200.json"
    other.write_text(json.dumps(result))
    lines = bench_tables.prompt_table(other)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    at = table[0].index("link")
    assert [row[at] for row in table[2:6]] == ["as it is", "emulated, 1/2", "emulated, 1/4", "as it is"]
    assert [row[table[0].index("link, ms")] for row in table[2:5]] == ["20", "40", "80"]
    assert "\n".join(lines).count("An emulated link copies each page") == 1 and lines[0] != plain.split("\n")[0]
