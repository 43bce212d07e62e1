"""A timeline keeps its beginning and its end, and makes words when asked."""

from motet.timeline import MAX_FIRST, MAX_LAST, Kind, Timeline


class Step(Kind):
    WENT = "went", "to {0} in {1:.1f} s"
    SLEPT = "slept", ""


def test_the_first_and_the_last_entries_stay_and_the_others_are_counted():
    timeline = Timeline()
    for number in range(200):
        timeline.note(float(number), Step.SLEPT)
        kept = [entry.at for entry in timeline if entry.kind is Step.SLEPT]
        assert len(kept) + timeline.left_out == number + 1
        assert kept[:MAX_FIRST] == [float(one) for one in range(min(number + 1, MAX_FIRST))]
    assert kept[MAX_FIRST:] == [float(number) for number in range(200 - MAX_LAST, 200)]


def test_one_entry_stands_for_those_left_out_from_the_time_of_the_first_of_them():
    timeline = Timeline()
    for number in range(MAX_FIRST + MAX_LAST + 5):
        timeline.note(float(number), Step.SLEPT)
    entries = list(timeline)
    before, gap, after = entries[MAX_FIRST - 1 : MAX_FIRST + 2]
    assert (before.at, gap.at, after.at) == (MAX_FIRST - 1, MAX_FIRST, MAX_FIRST + 5)
    assert (gap.event, gap.detail) == ("left out", "5 entries")


def test_words_are_made_of_the_arguments_when_somebody_asks():
    class Loud:
        asked = 0

        def __str__(self) -> str:
            self.asked += 1
            return "Harrow"

    place, timeline = Loud(), Timeline()
    timeline.note(1.0, Step.WENT, place, 0.25)
    (entry,) = timeline
    assert place.asked == 0
    assert (entry.event, entry.detail) == ("went", "to Harrow in 0.2 s")
