"""Unit tests of FlexDeMo's parts."""
