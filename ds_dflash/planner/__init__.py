"""Looking at a configuration before it is run: `ds-dflash plan`."""

from ds_dflash.planner.plan_command import add_arguments, run

__all__ = ["add_arguments", "run"]
