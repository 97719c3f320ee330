"""The configuration: ``schema`` (fields), ``load`` (files and overrides), ``check`` (combinations),
``derive`` (sizes that follow), ``explain`` (meaning and origin of a key).

This package imports neither torch nor Ray nor Megatron, so that ``plan`` and ``explain`` answer at once.
"""
