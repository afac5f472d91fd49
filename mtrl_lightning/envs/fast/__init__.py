"""Parts of MetaWorld and dm_control in faster code, with the same numbers."""
