"""The page of the documents' sizes: its numbers come from plans, its words follow from them."""

from types import SimpleNamespace

from scripts.document_sizes import MODELS, PAGE, Plans, held, judged, largest


def test_a_number_of_two_digits_is_confirmed_within_its_digits():
    assert judged(4.1875, said=4.2) == judged(0.25, said=0.25) == "confirmed"
    assert judged(7.2, said=8) == "contradicted: 0.9 times the document's"
    assert judged(2.8e12, said=1.4e12) == "contradicted: 2 times the document's"


def test_the_page_has_the_bytes_of_a_plan():
    """One row of the many. If this fails after a change of ZeRO or the planner, write the page again."""
    plan = Plans()(*MODELS["7B"], "zero=stage2", ranks=64)
    assert f"{sum(held(plan).values()):,} bytes" in PAGE.read_text()


def test_the_largest_model_is_the_last_that_fits():
    """Bytes that grow by more with every layer: the guess from two small plans is too high, and plans correct it."""

    class Growing(Plans):
        def __call__(self, *words, ranks):
            layers = int(words[-1].removeprefix("model.layers="))
            margin = 10_000 - 100 * layers - layers**2
            return SimpleNamespace(peak_bytes={"device": 10_000 - margin}, margin_bytes=margin, fits=margin >= 0)

    assert largest(Growing(), words=("model=30m",), ranks=8)[0] == 61  # 61 * 161 = 9,821, 62 * 162 = 10,044
