"""The names of other libraries, backed by Penstock: change the import, keep the script."""
