"""NSA for Hugging Face transformers: `AutoModelForCausalLM` builds, loads and saves it once this module is imported.

    import nsa.integrations.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER)

The decoder is that of `nsa.model`, block by block; what is here is transformers' way to configure it, to call it with
padded batches, and to generate. `convert` makes it from a dense Llama checkpoint.
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "nsa.integrations.transformers needs Hugging Face transformers; install the extra in a checkout: "
        "pip install -e '.[transformers]'"
    ) from error

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from nsa.integrations.transformers.cache import NSACache
from nsa.integrations.transformers.configuration import NSAConfig
from nsa.integrations.transformers.conversion import Conversion, convert
from nsa.integrations.transformers.modeling import NSAForCausalLM, NSAModel, NSAPreTrainedModel

AutoConfig.register(NSAConfig.model_type, NSAConfig)
AutoModel.register(NSAConfig, NSAModel)
AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM)

__all__ = [
    "Conversion",
    "NSACache",
    "NSAConfig",
    "NSAForCausalLM",
    "NSAModel",
    "NSAPreTrainedModel",
    "convert",
]
