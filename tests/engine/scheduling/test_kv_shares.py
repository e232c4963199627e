"""KVShare: several engines divide a device's KV memory, and a dead one's part is free."""

import signal
import subprocess
import sys
from pathlib import Path

from engine.scheduling.memory.kv_shares import KVShare

MIB = 1 << 20


def share_of(folder: Path, free: int = 1 << 40) -> KVShare:
    return KVShare(folder, 100 * MIB, lambda: free)


def test_engines_never_claim_the_same_bytes(tmp_path: Path) -> None:
    """Bug: the sum of claims exceeds the device, or what another keeps at least is taken."""
    first, second = share_of(tmp_path), share_of(tmp_path)
    first.settle(10 * MIB, least=30 * MIB)
    assert second.room() == 70 * MIB
    assert not second.wait_for(90 * MIB, 0.0)
    assert second.claim(50 * MIB) == 50 * MIB
    assert first.claim(90 * MIB) == 40 * MIB and first.room() == second.room() == 0
    second.settle(20 * MIB)
    assert first.room() == 30 * MIB
    first.close()
    assert second.room() == 80 * MIB
    second.close()


def test_memory_that_is_claimed_and_not_mapped_is_not_free(tmp_path: Path) -> None:
    """Bug: two engines see the same free memory of the device, and both map it."""
    first, second = share_of(tmp_path, 40 * MIB), share_of(tmp_path, 40 * MIB)
    assert first.claim(30 * MIB) == 30 * MIB
    assert second.claim(30 * MIB) == 10 * MIB
    first.close()
    second.close()


def test_memory_of_steps_is_left_for_them(tmp_path: Path) -> None:
    """Bug: blocks take what the next large step of this engine, or of another, needs."""
    first = KVShare(tmp_path, 100 * MIB, lambda: 40 * MIB, lambda: 15 * MIB)
    second = KVShare(tmp_path, 100 * MIB, lambda: 40 * MIB, lambda: 5 * MIB)
    for share in (first, second):
        share.report(used=0, short=0)
    assert first.room() == second.room() == 20 * MIB
    first.sleeping = True
    first.report(used=0, short=0)
    assert first.room() == second.room() == 35 * MIB
    assert second.claim(30 * MIB) == 30 * MIB
    second.settle(30 * MIB)
    first.sleeping, first._free = False, lambda: 10 * MIB
    second._free = first._free
    assert not first.wait_for(0, 0.0), "weights have no room"
    first.report(used=0, short=1)
    assert second.asked() == 10 * MIB + 1
    first.close()
    second.close()


def test_others_give_in_proportion_to_what_they_spare(tmp_path: Path) -> None:
    """Bug: each engine gives all that is asked for, or what its own requests use."""
    first, second, third = (share_of(tmp_path) for _ in range(3))
    assert first.claim(60 * MIB) and second.claim(30 * MIB) and third.claim(10 * MIB)
    for share, used in ((first, 20), (second, 10), (third, 10)):
        share.settle(share.own.claimed)
        share.report(used=used * MIB, short=0)
    assert first.asked() == second.asked() == 0
    third.report(used=10 * MIB, short=30 * MIB)
    assert first.asked() == 20 * MIB and second.asked() == 10 * MIB and third.asked() == 0
    second.report(used=30 * MIB, short=1)
    assert first.asked() == 30 * MIB + 1 and second.asked() == 0
    assert third.claim(MIB, last=True) == 0
    for share in (first, second, third):
        share.close()


_CHILD = """
import sys, time
from pathlib import Path
from engine.scheduling.memory.kv_shares import KVShare
share = KVShare(Path(sys.argv[1]), 100, lambda: 100)
share.claim(60)
print("claimed", flush=True)
time.sleep(60)
"""


def test_the_share_of_a_killed_engine_is_free(tmp_path: Path) -> None:
    """Bug: memory that a dead process had is never used again."""
    share = KVShare(tmp_path, 100, lambda: 100)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "claimed\n"
    assert share.claim(100) == 40
    share.settle(40)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert share.room() == 60 and share.others() == []
    assert len(list(tmp_path.glob("*.share"))) == 1, "the dead engine's file is left"
    share.close()
