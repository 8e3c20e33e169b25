"""The kernels that fetch pages from host memory and, by a mailbox, from a drive, as they are compiled, run on the CPU
beside answers that are there: see `ptx`."""

import pytest
import torch

from tests.emulator.ptx import Machine
from tests.emulator.test_ptx import gpu  # noqa: F401  # a fixture
from vbrt.kernels.cuda.experts import drive_mail
from vbrt.kernels.cuda.experts.drive_mail import ANSWER, COUNT, GAVE_UP, LIST, POST, DriveMail, room_words

pytest.importorskip("triton.experimental.gluon")

PAGES, WORDS = 8, 512  # entries of a fetch table; words of a page
CPU = torch.device("cpu")


class Fetch:
    """Pages in host memory and on a drive, `far`, that a lease is missing, and slots for them."""

    def __init__(self, far, batch=4, units=(1, 2)):
        self.units = [units[i % 2] for i in range(len(far))]
        self.slots = [torch.zeros(2 * WORDS, dtype=torch.int64) for _ in far]
        self.pages = [torch.randint(1, 1 << 40, (2 * WORDS,)) for _ in far]
        Machine.pages = [*self.slots, *self.pages]
        self.table, self.far = torch.zeros(1 + 3 * PAGES, dtype=torch.int64), far
        self.table[0] = len(far)
        for i, number in enumerate(far):
            self.table[1 + i] = self.pages[i].data_ptr() if number is None else -1 - number
            self.table[1 + PAGES + i] = self.slots[i].data_ptr()
            self.table[1 + 2 * PAGES + i] = self.units[i]
        self.words = torch.zeros(room_words(batch), dtype=torch.int64)
        self.mail = DriveMail(self.words, batch, PAGES, 1, CPU)
        self.batch = batch

    def answer(self, number, entries):
        self.words[ANSWER] = number
        for rank, entry in enumerate(entries):
            self.words[LIST + self.batch + rank] = self.pages[entry].data_ptr()

    def fetch(self, missing=None):
        missing = len(self.far) if missing is None else missing
        self.mail.fetch(self.table, torch.zeros(WORDS, dtype=torch.int64), 2, pages=PAGES, missing=missing)

    def came(self):
        """Entries whose slots have their pages' bytes, and nothing behind them."""
        return [
            i for i, units in enumerate(self.units)
            if torch.equal(self.slots[i][: units * WORDS], self.pages[i][: units * WORDS])
            and not self.slots[i][units * WORDS :].any()
        ]  # fmt: skip


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(drive_mail, "_PROGRAMS", 3)
    monkeypatch.setattr(Machine, "pages", ())


def test_pages_on_the_drive_are_posted_and_copied_from_where_the_answer_says(gpu):  # noqa: F811
    case = Fetch([None, 7, None, 3, 300])
    case.answer(1, [1, 3, 4])
    case.fetch(missing=4)  # of one post
    assert case.came() == [0, 1, 2, 3, 4]
    words = case.words.tolist()
    assert (words[POST], words[COUNT], words[LIST : LIST + 3], words[GAVE_UP]) == (1, 3, [7, 3, 300], 0)
    assert case.mail._state.tolist() == [1, 0, 3] and gpu == ["ask_kernel", "bring_kernel"]


def test_more_pages_than_a_post_takes_come_in_several(gpu):  # noqa: F811
    case = Fetch([7, None, 3, 300, 1, None], batch=3)
    case.answer(1, [0, 2, 3])
    case.fetch()  # of which the second post is not answered
    assert gpu == 2 * ["ask_kernel", "bring_kernel"]
    assert case.came() == [0, 1, 2, 3, 5] and bool((case.slots[4][: case.units[4] * WORDS] == -1).all())
    assert case.words[POST] == 2 and case.words[COUNT] == 1 and case.words[LIST] == 1 and case.words[GAVE_UP] == 2


def test_a_lease_without_pages_on_the_drive_posts_nothing_and_waits_for_nobody(gpu):  # noqa: F811
    case = Fetch([None, None, None])
    case.mail.wait_us = 1 << 30
    case.fetch()
    assert case.came() == [0, 1, 2] and not case.words.any() and not case.mail._state.any()


@pytest.mark.parametrize("answer", [0, -1], ids=["late", "refused"])
def test_without_an_answer_slots_get_ones_and_later_leases_do_not_wait(answer, gpu):  # noqa: F811
    case = Fetch([7, None])
    case.answer(answer, [0])
    case.fetch()
    assert case.came() == [1] and bool((case.slots[0][:WORDS] == -1).all()) and not case.slots[0][WORDS:].any()
    assert case.words[GAVE_UP] == 1 and case.mail._state.tolist() == [1, 1, 1]
    case.mail.wait_us = 1 << 30
    case.fetch()
    assert case.words[POST] == 2 and case.words[GAVE_UP] == 1  # the first one
    case.mail.mend()
    case.answer(3, [0])
    case.fetch()
    assert case.came() == [0, 1]
