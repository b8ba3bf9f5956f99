"""Builds the package from settings.ini, the one home of the metadata."""

from configparser import ConfigParser

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
meta = config["DEFAULT"]


def lines(key):
    return [line.strip() for line in meta[key].splitlines() if line.strip()]


setup(
    version=meta["version"],
    description=meta["description"],
    author=meta["author"],
    license_expression=meta["license"],
    keywords=meta["keywords"].split(", "),
    packages=find_packages(include=["llmlab", "llmlab.*"]),
    install_requires=lines("requirements"),
    extras_require={"dev": lines("dev_requirements"), "docs": lines("docs_requirements")},
    entry_points={"console_scripts": lines("console_scripts"), "nbdev": ["llmlab=llmlab._modidx:d"]},
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
