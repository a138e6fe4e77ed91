"""The ring between host and device: nothing is lost, overwritten or dropped too early."""

from __future__ import annotations

import ctypes
import threading
import weakref

import pytest
import torch

from graphkit.buffers import ENTRIES, FieldWriter, Mailbox, mailbox as module
from graphkit.errors import ReplayError
from graphkit.ops.refresh import FROM_PAYLOAD, Header

CPU = torch.device("cpu")


@pytest.fixture
def mailbox(verify_layouts):
    return Mailbox(tuple(verify_layouts.values()), CPU)


class Thing:
    """Something that a launch reads."""


def launch(mailbox, in_flight=None):
    index = mailbox.claim()
    mailbox.post(index, 2, 8)
    mailbox.commit(in_flight)
    return index


def consume(mailbox, upto):
    mailbox.ring[0] = upto
    mailbox.device_sequence.fill_(upto)


def test_turns_go_round(mailbox):
    entries = []
    for turn in range(10):
        entries.append(launch(mailbox))
        header = mailbox.entry(entries[-1])[: Header.SOURCES].tolist()
        assert header == [turn, 2, 8, 1] == list(mailbox.words(entries[-1])[: Header.SOURCES])
        consume(mailbox, turn + 1)
    assert entries == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert mailbox.sequence == 10


def test_a_entry_that_was_not_committed_is_claimed_again(mailbox):
    launch(mailbox)
    assert mailbox.claim() == mailbox.claim() == launch(mailbox) == 1


def test_claim_waits_until_its_entry_was_consumed(mailbox):
    for _ in range(ENTRIES):
        launch(mailbox)
    before, claimed = mailbox.ring.clone(), []
    waiting = threading.Thread(target=lambda: claimed.append(launch(mailbox)), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert torch.equal(mailbox.ring, before)
    consume(mailbox, 1)
    waiting.join(10)
    assert claimed == [0]
    assert mailbox.words(0)[Header.SEQUENCE] == ENTRIES
    assert torch.equal(mailbox.entry(1), before[8:].view(ENTRIES, -1)[1])


def test_a_dead_device_ends_the_wait(verify_layouts):
    deaths = [RuntimeError("an illegal memory access"), None]

    def check_device():
        if deaths[0]:
            raise deaths.pop(0)
        consume(mailbox, 2)

    mailbox = Mailbox(tuple(verify_layouts.values()), CPU, check_device)
    for _ in range(ENTRIES):
        launch(mailbox)
    assert len(deaths) == 2, "asked without waiting"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        mailbox.claim()
    assert mailbox.claim() == 0


def test_the_wait_has_an_end(mailbox, monkeypatch):
    monkeypatch.setattr(module, "_GIVE_UP_S", 0.02)
    for _ in range(ENTRIES):
        launch(mailbox)
    with pytest.raises(ReplayError, match="consumed no mailbox entry for 0 s"):
        mailbox.claim()
    assert mailbox.sequence == ENTRIES
    consume(mailbox, 1)
    assert mailbox.claim() == 0


def test_a_fault_names_its_replay(mailbox):
    mailbox.ring[1] = 8
    with pytest.raises(
        ReplayError, match=r"replay 7 read the mailbox entry of another replay.*Two threads"
    ):
        mailbox.claim()


def test_addresses_hold_for_one_turn(mailbox):
    word = Header.SOURCES + 1
    for turn in range(ENTRIES):
        mailbox.point(mailbox.claim(), word, 4096 + turn)
        mailbox.point(mailbox.claim(), word + 5, 8192 + turn)  # the first claim came to nothing
        assert mailbox.words(turn)[word] == FROM_PAYLOAD
        mailbox.post(turn, 1, 4)
        mailbox.commit()
    consume(mailbox, 2)
    assert mailbox.claim() == 0
    assert [mailbox.words(i)[word + 5] for i in range(ENTRIES)] == [FROM_PAYLOAD, 8193, 8194, 8195]


@pytest.mark.parametrize("lag", range(ENTRIES))
def test_what_a_launch_reads_lives_until_the_next_one_began(mailbox, lag):
    """An entry is consumed before its addresses were read, so the next one tells that they were."""
    refs = []
    for turn in range(12):
        consume(mailbox, max(turn - lag, 0))
        thing = Thing()
        refs.append(weakref.ref(thing))
        launch(mailbox, thing)
        del thing
        alive = [n for n, ref in enumerate(refs) if ref() is not None]
        consumed = int(mailbox.ring[0])
        assert set(range(max(consumed - 1, 0), turn + 1)) <= set(alive)
        assert alive == list(range(max(turn - ENTRIES, 0), turn + 1))


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_launch_that_was_not_committed_is_counted_if_the_device_read_it(
    verify_layouts, is_launched
):
    """``cudaGraphLaunch`` may have enqueued the graph before an interrupt arrived."""

    def wait_for_device():
        waits.append(mailbox.sequence)
        consume(mailbox, mailbox.sequence + is_launched)

    waits = []
    mailbox = Mailbox(tuple(verify_layouts.values()), CPU, wait_for_device=wait_for_device)
    consume(mailbox, launch(mailbox) + 1)
    mailbox.post(mailbox.claim(), 2, 8)
    assert not waits
    assert mailbox.claim() == 1 + is_launched
    assert (mailbox.sequence, mailbox.ring[0]) == (1 + is_launched, 1 + is_launched)
    launch(mailbox)
    assert waits == [1], "the device is waited for once"


def test_rewind_forgets_what_nobody_consumed(mailbox):
    for _ in range(3):
        launch(mailbox)
    consume(mailbox, 1)
    mailbox.rewind()
    assert mailbox.sequence == 1
    assert launch(mailbox) == 1
    assert mailbox.words(1)[Header.SEQUENCE] == 1


def staged_rows(mailbox, layout, rows):
    """Hand host rows over as to a GPU; gives the address that the entry names."""
    index = mailbox.claim()
    kept = FieldWriter(mailbox, index, layout, rows.shape[0], torch.device("cuda", 0)).write(rows)
    address = mailbox.words(index)[Header.SOURCES + layout.first_segment]
    assert kept.data_ptr() == address
    mailbox.post(index, 1, 4)
    mailbox.commit([kept])
    return address


def test_host_rows_of_a_large_field_are_staged(mailbox, verify_layouts):
    rows = torch.randn(4, 8)
    address = staged_rows(mailbox, verify_layouts["input_embeds"], rows)
    assert address != rows.data_ptr()
    seen = (ctypes.c_float * 32).from_address(address)
    assert list(seen) == rows.view(-1).tolist()


def test_staged_rows_stand_until_the_next_launch_began(mailbox, verify_layouts):
    """Turn 4 may be written once slot 0 is consumed; its address may still be read then."""
    addresses = []
    for turn in range(12):
        consume(mailbox, max(turn - ENTRIES + 1, 0))
        addresses.append(staged_rows(mailbox, verify_layouts["input_embeds"], torch.ones(4, 8)))
        unread = addresses[max(int(mailbox.ring[0]) - 1, 0) :]
        assert len(set(unread)) == len(unread), f"turn {turn} overwrites rows in flight"
    assert len(set(addresses)) < len(addresses), "staging grows without end"
