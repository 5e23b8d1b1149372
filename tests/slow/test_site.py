"""No page of the documentation is wider than its window at 1,300 and 480 pixels, and every picture is drawn without a network. Tables and code
may scroll. Run `mkdocs build` first."""

from pathlib import Path

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
# The page's horizontal overflow, and the elements beyond its edge that no scrolling parent contains.
WIDER = """(() => {
  const own = (one) => /auto|scroll|hidden/.test(getComputedStyle(one).overflowX);
  const scrolls = (one) => one && one !== document.body && (own(one) || scrolls(one.parentElement));
  const outside = (one) => one.getBoundingClientRect().right > innerWidth + 1 && !scrolls(one);
  const out = [...document.querySelectorAll('.md-content *')].filter(outside);
  return [document.documentElement.scrollWidth - innerWidth, out.slice(0, 3).map((one) => one.outerHTML.slice(0, 90))];
})()"""

MISSING = "[...document.images].filter((one) => !one.complete || !one.naturalWidth).map((one) => one.src)"


def test_every_page_fits_its_window(browser):
    pages, faults = sorted(SITE.rglob("*.html")), []
    assert pages, f"{SITE} has no page: run `mkdocs build` first"
    tab = browser()
    for page in pages:
        for width in (1300, 480):
            tab.open(page, width=width, dark=False)
            excess, elements = tab.evaluate(WIDER)
            if excess > 0 or elements:
                faults.append(f"{page.relative_to(SITE)} at {width}: {excess} pixels too wide {elements}")
        faults += [f"{page.relative_to(SITE)}: {source} is not drawn" for source in tab.evaluate(MISSING)]
    assert not faults, "\n".join(faults)
