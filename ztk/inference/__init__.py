"""The inference engine: exact answers from many sequences at once.

generator = ztk.Generator(model)
[[completion]] = generator.generate([prompt], sampling=SamplingParams(max_tokens=64, temperature=0.7))
"""

from ztk.core.policies.inference import InferencePolicy as InferencePolicy
from ztk.inference.generator import Generator as Generator
from ztk.inference.opening import UnreadModel as UnreadModel
from ztk.inference.packed import Packed as Packed
from ztk.inference.packed import open_packed as open_packed
from ztk.inference.packed import pack as pack
from ztk.inference.policy import Completion as Completion
from ztk.inference.policy import Grammar as Grammar
from ztk.inference.policy import GrammarState as GrammarState
from ztk.inference.policy import Output as Output
from ztk.inference.policy import PromptLogprob as PromptLogprob
from ztk.inference.policy import SamplingParams as SamplingParams
from ztk.inference.requests import Request as Request
from ztk.inference.scoring import EncodedChoices as EncodedChoices
from ztk.inference.scoring import Scorer as Scorer
from ztk.inference.scoring import encode_choices as encode_choices
from ztk.inference.scoring import log_likelihoods as log_likelihoods
from ztk.inference.scoring import perplexity as perplexity
from ztk.inference.scoring import score_choices as score_choices
from ztk.inference.scoring import windows as windows
