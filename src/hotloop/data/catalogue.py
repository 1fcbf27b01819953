"""The public data sets that hotloop knows: files, sizes, mirrors, licences, and checksums of the unpacked content, so
that a file is the same file whether it lies there plain, gzipped by its publisher or gzipped again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hotloop.errors import DataError, did_you_mean


@dataclass(frozen=True)
class Download:
    name: str
    mirrors: tuple[str, ...]
    size: int
    checksum: str


@dataclass(frozen=True)
class KnownFile:
    """One file of a set: `name` on the disk (or `name`.gz) and what its unpacked content must be."""

    name: str
    size: int
    checksum: str
    download: Download
    member: str = ""  # path inside the downloaded archive; empty when the download is the file itself
    needed: bool = True  # whether the set can be loaded at all without this file

    @property
    def stored_as(self) -> str:
        """The name under which a fetch leaves this file on the disk."""
        return self.name if self.member else self.download.name


@dataclass(frozen=True)
class KnownSet:
    name: str
    what: str
    licence: str
    folders: tuple[str, ...]  # it may lie in; the first is where a fetch puts it
    files: tuple[KnownFile, ...] = ()
    expected: str = ""  # for a set that cannot be fetched: the files a user has to bring

    @property
    def downloads(self) -> tuple[Download, ...]:
        return tuple(dict.fromkeys(file.download for file in self.files))

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def _files(
    mirrors: tuple[str, ...], downloads: str, content: str, *, inside: str = "", parts: tuple[str, ...] = ()
) -> tuple[KnownFile, ...]:
    """The files of a set from two tables of name, size and checksum: what is downloaded, and what each file must be.
    `inside` is the folder in an archive that they come from; a set can be loaded without those of `parts`."""
    packed = {name: Download(name, mirrors, size, checksum) for name, size, checksum in _rows(downloads)}
    return tuple(
        KnownFile(
            name,
            size,
            checksum,
            next(iter(packed.values())) if inside else packed.get(name) or packed[f"{name}.gz"],
            member=f"{inside}/{name}" if inside else "",
            needed=name not in parts,
        )
        for name, size, checksum in _rows(content)
    )


def _rows(table: str) -> Iterator[tuple[str, int, str]]:
    for line in table.strip().splitlines():
        name, size, checksum = line.split()
        yield name, int(size.replace(",", "")), checksum


_MNIST = _files(
    (
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
    ),
    """
    train-images-idx3-ubyte.gz   9,912,422 sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
    train-labels-idx1-ubyte.gz      28,881 sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
    t10k-images-idx3-ubyte.gz    1,648,877 sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
    t10k-labels-idx1-ubyte.gz        4,542 sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6
    """,
    """
    train-images-idx3-ubyte     47,040,016 sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
    train-labels-idx1-ubyte         60,008 sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
    t10k-images-idx3-ubyte       7,840,016 sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
    t10k-labels-idx1-ubyte          10,008 sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
    """,
)
# Of Fashion-MNIST's unpacked files only the md5 is published; the downloads themselves are held to sha256.
_FASHION = _files(
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    """
    train-images-idx3-ubyte.gz  26,421,880 sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
    train-labels-idx1-ubyte.gz      29,515 sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
    t10k-images-idx3-ubyte.gz    4,422,102 sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
    t10k-labels-idx1-ubyte.gz        5,148 sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5
    """,
    """
    train-images-idx3-ubyte     47,040,016 md5:f4a8712d7a061bf5bd6d2ca38dc4d50a
    train-labels-idx1-ubyte         60,008 md5:9018921c3c673c538a1fc5bad174d6f9
    t10k-images-idx3-ubyte       7,840,016 md5:8181f5470baa50b63fa0f6fddb340f0a
    t10k-labels-idx1-ubyte          10,008 md5:15d484375f8d13e6eb1aabb0c3f46965
    """,
)
_AMAT = """
    binarized_mnist_train.amat  78,400,000 sha256:ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d
    binarized_mnist_valid.amat  15,680,000 sha256:1de3d397c40fe8eeb33dafd4099a1f665ec01e96d9be234aaeeac8a34930e2e2
    binarized_mnist_test.amat   15,680,000 sha256:e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c
"""
# The second address is where the first one redirects to; some proxies stop at the redirect.
_TORONTO = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")
_CIFAR10 = _files(
    ("https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/", *_TORONTO),
    """
    cifar-10-binary.tar.gz     170,052,171 sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd
    """,
    """
    data_batch_1.bin            30,730,000 sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5
    data_batch_2.bin            30,730,000 sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed
    data_batch_3.bin            30,730,000 sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67
    data_batch_4.bin            30,730,000 sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48
    data_batch_5.bin            30,730,000 sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add
    test_batch.bin              30,730,000 sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b
    """,
    inside="cifar-10-batches-bin",
    parts=("data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"),
)
_CIFAR100 = _files(
    _TORONTO,
    """
    cifar-100-binary.tar.gz    168,513,733 sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec
    """,
    """
    train.bin                  153,700,000 sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29
    test.bin                    30,740,000 sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a
    """,
    inside="cifar-100-binary",
)
_MOVIELENS = _files(
    ("https://files.grouplens.org/datasets/movielens/",),
    """
    ml-100k.zip                  4,924,029 sha256:50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229
    """,
    """
    u.data                       1,979,173 sha256:06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490
    """,
    inside="ml-100k",
)

_SETS = (
    KnownSet(
        "mnist",
        "60,000 + 10,000 handwritten digits, 28x28x1",
        "CC BY-SA 3.0 (LeCun, Cortes)",
        ("mnist",),
        _MNIST,
    ),
    KnownSet(
        "fashion_mnist",
        "60,000 + 10,000 pieces of clothing, 28x28x1",
        "MIT (Zalando)",
        ("fashion_mnist", "fashion-mnist", "fashionmnist"),
        _FASHION,
    ),
    KnownSet(
        "binarised_mnist",
        "50,000 + 10,000 + 10,000 digits of zeros and ones",
        "as MNIST (bits by Larochelle)",
        ("binarised_mnist", "binarized_mnist"),
        _files(
            (
                "https://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/",
                "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
            ),
            _AMAT,
            _AMAT,
        ),
    ),
    KnownSet(
        "cifar10",
        "50,000 + 10,000 photographs, 32x32x3, 10 classes",
        "none stated (Krizhevsky 2009)",
        ("cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10-subset"),
        _CIFAR10,
    ),
    KnownSet(
        "cifar100",
        "50,000 + 10,000 photographs, 32x32x3, 100 classes",
        "none stated (Krizhevsky 2009)",
        ("cifar100", "cifar-100-binary", "cifar100/cifar-100-binary"),
        _CIFAR100,
    ),
    KnownSet(
        "movielens-100k",
        "100,000 ratings by 943 users of 1,682 films",
        "research use (GroupLens)",
        ("ml-100k", "movielens-100k"),
        _MOVIELENS,
    ),
    KnownSet(
        "netflix",
        "100,480,507 ratings by 480,189 users of 17,770 films",
        "Netflix Prize terms",
        ("netflix", "netflix_data"),
        expected="{3m,6m,1y,full}_train.txt and _valid.txt: user, item and rating separated by tabs",
    ),
    KnownSet(
        "imagenet",
        "1,281,167 + 50,000 photographs, 1,000 classes",
        "ImageNet terms of access",
        ("imagenet", "imagenet-data"),
        expected="train-00000-of-01024 to train-01023-of-01024 and validation-00000-of-00128 to "
        "validation-00127-of-00128 (TFRecord)",
    ),
)
SETS: Mapping[str, KnownSet] = MappingProxyType({known.name: known for known in _SETS})


def known_set(name: str) -> KnownSet:
    """The set of that name (hyphens and underscores are alike); DataError with the nearest names."""
    names = {known.replace("-", "_"): known for known in SETS}
    wanted = name.lower().replace("-", "_").replace("binarized", "binarised")
    if wanted not in names:
        raise DataError(f"{name}: no such data set{did_you_mean(name, SETS)}")
    return SETS[names[wanted]]
