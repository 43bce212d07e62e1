from motet_scheduler.welcomed_peers import WelcomedPeers


def test_a_peer_is_known_when_it_comes_again():
    greeted = WelcomedPeers()
    assert not greeted.welcome("runner r0 1")
    assert greeted.welcome("runner r0 1")


def test_the_longest_unseen_peers_are_forgotten():
    """Every start of a runner is a new peer, so their number grows without a limit."""
    greeted = WelcomedPeers(3)
    greeted.welcome("stays")
    for n in range(100):
        greeted.welcome(f"runner r0 {n}")
        assert greeted.welcome("stays")
    assert len(greeted) == 3
    assert not greeted.welcome("runner r0 0")
