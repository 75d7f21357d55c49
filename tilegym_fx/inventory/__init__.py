"""The inventory: Definitions, Solutions, spellings and kernels, read from folders.

An inventory is code: references, spellings and kernels are executed. Only the shipped inventory and roots
that the user names (as arguments or in ``TILEGYM_FX_INVENTORY``) are ever read.

    inventory = load()
    inventory.definitions["rms_norm"].inputs
    inventory.reference("rms_norm")(hidden_states, weight, eps)
"""

from tilegym_fx.inventory.layout import Root, shipped_root
from tilegym_fx.inventory.store import Inventory, load

__all__ = ["Inventory", "Root", "load", "shipped_root"]
