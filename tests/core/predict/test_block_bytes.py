"""The list of blocks, with numbers small enough to add in the head."""

from recipes_lib.core.predict.block_bytes import BlockBytes, DryBlocks

BLOCK = BlockBytes(saved=10, forward=12, backward=15, at_once=14, gradients=3)


def blocks():
    return DryBlocks(reason="", blocks=(BLOCK, BLOCK), behind=4, head=5, waiting=1)


def test_the_worst_block_is_the_last_of_a_plain_step():
    totals = [sum(m.values()) for m in blocks().moments(activations=26, carried=0)]
    # Before the blocks 26 - 20 - 4 = 2 are saved. Backward in both, each followed by its forward.
    assert totals == [5 + 3 + 2 + 15, 2 + 12, 5 + 2 + 10 + 15, 2 + 10 + 12]


def test_a_checkpoint_keeps_less_and_is_whole_again_inside():
    kept = blocks().keeping([1, 1])
    assert kept.saved == 2
    totals = [sum(m.values()) for m in kept.moments(activations=8, carried=0)]
    assert totals[0] == 5 + 3 + 2 + 15 and totals[2] == 5 + 2 + 1 + 15


def test_more_that_each_block_saves():
    more = blocks().saving_more([7, 0])
    assert more.saved == 27 and more.blocks[0].backward == 22
    assert more.blocks[1] == blocks().blocks[1]
