"""Translating words: `chat>` -> `cat`."""

import torch

from ztk.core.runtime.seed import generator
from ztk.experiments.tasks.task import Task

# French and English, of at most six letters each.
PAIRS = (
    "chat cat, chien dog, pain bread, eau water, lune moon, soleil sun, mer sea, ciel sky, feu fire, bois wood, fleur flower, herbe grass, "
    "main hand, pied foot, nez nose, bouche mouth, livre book, lettre letter, porte door, clef key, rue street, ville town, maison house, "
    "roi king, reine queen, fils son, fille girl, ami friend, jour day, nuit night, hiver winter, neige snow, pluie rain, vent wind, "
    "rouge red, vert green, noir black, blanc white, petit small, grand tall"
)
LEXICON = {words[0]: words[1] for words in map(str.split, PAIRS.split(", "))}


class Lexicon(Task):
    """Forty words, to be memorized."""

    def text(self, *, seed: int, number: int) -> str:
        """A French word and `>`."""
        index = int(torch.randint(len(LEXICON), (), generator=generator(seed, "lexicon", number)))
        return f"{list(LEXICON)[index]}>"

    def answer(self, text: str) -> str:
        """The English word."""
        return LEXICON[text.removesuffix(">")]

    def wrong(self, text: str, *, seed: int, number: int) -> str:
        """Another English word."""
        others = [word for word in LEXICON.values() if word != self.answer(text)]
        return others[int(torch.randint(len(others), (), generator=generator(seed, "wrong", number)))]
