"""What every section of the configuration is."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

#: A path of this machine, or an address; `~` is the home of who starts the run, as a shell does not expand it behind `run_dir=`.
Where = Annotated[str, AfterValidator(os.path.expanduser)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
