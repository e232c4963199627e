"""The check by which the long runs find what is left behind."""

from tests.faults.soak import CALL, more_tasks


def test_a_task_that_stays_is_named_and_a_health_check_is_none() -> None:
    """A run that is called unclean because Serve looked at a router while it was counted; or a
    watcher that each kill leaves, hidden by another that has ended."""
    before = {"Client.keep": 4, "Model.watch": 2, CALL: 1}
    assert more_tasks("router", before, before | {CALL: 2, "Client.keep": 3}) == []
    after = {"Client.keep": 3, "Model.watch": 3, "new": 1, CALL: 1}
    assert more_tasks("router", before, after) == [
        "a router's tasks Model.watch: 2, then 3",
        "a router's tasks new: 0, then 1",
    ]
