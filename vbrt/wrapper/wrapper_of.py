"""`vbrt.of`: the wrapper of a model that another library loaded wrapped."""

from torch import nn

from vbrt.errors import WrapError
from vbrt.model.attachment import Attachment, attached_to
from vbrt.wrapper.wrapper import VBModelWrapper
from vbrt.wrapper.wrapper_choice import facade_of

__all__ = ["attachment_of", "of"]


def of(model: nn.Module) -> VBModelWrapper:
    """Return the wrapper of a wrapped model: stats, budgets, timeline, save, unwrap.

    Args:
        model: from `from_pretrained` with a `vbrt.QuantizationConfig`, `vb.module`, or a module that contains one of
            these, such as a model with adapters. A wrapper is returned as it is.

    Raises WrapError: it contains no wrapped model, or it was unwrapped.
    """
    if isinstance(model, VBModelWrapper):
        return model
    attachment = attachment_of(model)
    return facade_of(attachment.model, attachment)


def attachment_of(model: nn.Module) -> Attachment:
    """Return the attachment of a wrapped model, or of the first one in it. Raises WrapError as `of` does."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        attachment = attached_to(module)  # a deep copy has the hook of the model that it was made of
        if attachment is not None:
            return attachment if _is_of(attachment, module) else attachment.seed().attach_to(module)
    raise WrapError(
        f"of() got {type(model).__name__}; expected a model that is wrapped: by vbrt.wrap(), vbrt.load(), or "
        "from_pretrained(..., quantization_config=vbrt.QuantizationConfig(...))"
    )


def _is_of(attachment: Attachment, model: nn.Module) -> bool:
    try:
        return attachment.model is model
    except WrapError:  # its model is gone
        return False
