from motet_scheduler.greeted import Greeted


def test_a_peer_is_known_when_it_comes_again():
    greeted = Greeted()
    assert not greeted.greet("runner r0 1")
    assert greeted.greet("runner r0 1")


def test_the_longest_unseen_peers_are_forgotten():
    """Every start of a runner is a peer of its own: in a cluster there is no end of them."""
    greeted = Greeted(3)
    greeted.greet("stays")
    for n in range(100):
        greeted.greet(f"runner r0 {n}")
        assert greeted.greet("stays")
    assert len(greeted) == 3
    assert not greeted.greet("runner r0 0")
