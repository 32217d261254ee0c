"""Other libraries' names, kept by Penstock: change the import, keep the script."""
