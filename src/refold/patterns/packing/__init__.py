"""Computing on the real tokens of a padded batch alone: what may be packed, why that is sound, and the operators."""
