"""Tools for those who work on the project; nothing that is installed or shipped."""
