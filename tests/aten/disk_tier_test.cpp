#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "csrc/aten/content_stamp.h"
#include "residency/aten/manager.h"
#include "residency/aten/tensor_block.h"
#include "residency/aten/torch_backend.h"
#include "tests/aten/fixture.h"

namespace residency::testing {
namespace {

using ::testing::HasSubstr;

std::vector<char> bytes_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void write_bytes(const std::filesystem::path& path, const std::vector<char>& bytes) {
  std::ofstream stream(path, std::ios::binary | std::ios::trunc);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::size_t header_bytes_of(const std::vector<char>& file) {
  std::size_t length = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    length |= static_cast<std::size_t>(static_cast<unsigned char>(file[i])) << (8 * i);
  }
  return length + 8;
}

/// Everything about tensors that a move could lose.
TensorResident awkward_value() {
  const at::Tensor base = at::arange(60, at::kFloat).view({3, 4, 5});
  const at::Tensor images = at::arange(2 * 3 * 4 * 5, at::kFloat)
                                .view({2, 3, 4, 5})
                                .contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor complex = at::arange(6).to(at::kComplexFloat);
  const at::Tensor tied = at::ones({7}).set_requires_grad(true);
  return TensorResident({{"bytes", at::arange(3, at::kByte)},
                         {"base", base},
                         {"slice", base.narrow(1, 1, 2)},
                         {"transposed", base.transpose(0, 2)},
                         {"channels_last", images},
                         {"conjugate", complex.conj()},
                         {"negative", at::arange(4, at::kDouble)._neg_view()},
                         {"expanded", at::ones({1, 2}).expand({50, 2})},
                         {"tied", tied},
                         {"tied too", tied},
                         {"half", at::arange(9, at::kHalf)},
                         {"scalar", at::ones({}, at::kLong)},
                         {"empty", at::empty({0, 4})},
                         {"__metadata__", at::ones({2}, at::kBool)},
                         {"quote\"and\\umlaut\xc3\xbc", at::ones({2}, at::kInt)}});
}

TensorResident clone_of(const TensorResident& value) {
  TensorResident::Fields fields;
  for (std::size_t i = 0; i < value.size(); ++i) {
    fields.emplace_back(value.name(i), value[i].detach().clone());
  }
  return TensorResident(std::move(fields));
}

class DiskTierTest : public ::testing::TestWithParam<FileEngine> {
 protected:
  std::shared_ptr<Manager> make_manager(ManagerOptions options) {
    return create_manager(std::move(options), {.file_engine = GetParam(), .system_calls = calls_});
  }
  std::shared_ptr<Manager> make_manager() { return make_manager(with_disk(directory_)); }

  TemporaryDirectory directory_;
  std::shared_ptr<FaultySystemCalls> calls_ = std::make_shared<FaultySystemCalls>();
};

// Goes back when it ends; the other tests name their directories absolutely.
class WorkingDirectory {
 public:
  explicit WorkingDirectory(const std::filesystem::path& path)
      : previous_(std::filesystem::current_path()) {
    std::filesystem::current_path(path);
  }
  WorkingDirectory(const WorkingDirectory&) = delete;
  WorkingDirectory& operator=(const WorkingDirectory&) = delete;
  ~WorkingDirectory() { std::filesystem::current_path(previous_); }

 private:
  std::filesystem::path previous_;
};

TEST_P(DiskTierTest, RelativeDirectoryIsFoundAfterAChangeOfTheWorkingDirectory) {
  TemporaryDirectory elsewhere;
  std::filesystem::create_directory(directory_.path() / "spill");
  std::shared_ptr<Manager> manager;
  {
    const WorkingDirectory here(directory_.path());
    manager = make_manager(with_disk("spill"));
  }
  const WorkingDirectory there(elsewhere.path());
  const Handle handle = adopt(*manager, TensorResident({{"x", at::ones({64})}}));
  manager->move(handle, kDisk).wait();
  EXPECT_TRUE(take(*manager, handle)["x"].equal(at::ones({64})));
  manager->close();
  EXPECT_TRUE(directory_.files().empty());
}

INSTANTIATE_TEST_SUITE_P(Engines, DiskTierTest,
                         ::testing::Values(FileEngine::kAutomatic, FileEngine::kBlocking),
                         [](const auto& info) {
                           return info.param == FileEngine::kBlocking ? "Blocking" : "Automatic";
                         });

/// What only io_uring can do.
class RingTest : public DiskTierTest {
  void SetUp() override {
    if (!io_uring_is_usable()) {
      GTEST_SKIP() << "this kernel allows no io_uring";
    }
    DiskTierTest::SetUp();
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, RingTest, ::testing::Values(FileEngine::kAutomatic),
                         [](const auto&) { return "Automatic"; });

TEST(ContentStamp, IsXxh64) {
  const auto stamp_of = [](std::string_view text) {
    ContentStamp stamp;
    stamp.add(text.data(), text.size());
    return stamp.value();
  };
  EXPECT_EQ(stamp_of(""), 0xef46db3751d8e999U);
  EXPECT_EQ(stamp_of("a"), 0xd24ec4f1a98c6e5bU);
  EXPECT_EQ(stamp_of("abc"), 0x44bc2cf5ad770999U);
  EXPECT_EQ(stamp_of("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1U);
  const std::string text(1000, 'x');
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    ContentStamp pieces;
    pieces.add(text.data(), cut);
    pieces.add(text.data() + cut, text.size() - cut);
    ASSERT_EQ(pieces.value(), stamp_of(text)) << cut;
  }
}

TEST_P(DiskTierTest, EverythingIsKeptThroughEveryTier) {
  ManagerOptions options = with_disk(directory_);
  options.disks.push_back(
      {.name = "other", .directory = directory_.path(), .budget = std::nullopt, .fsync = true});
  const auto manager = make_manager(std::move(options));
  const TensorResident value = awkward_value();
  const TensorResident before = clone_of(value);
  const Handle handle = adopt(*manager, value);
  for (int round = 0; round < 3; ++round) {
    manager->move(handle, kDisk);
    manager->move(handle, Location::disk("other"));
    manager->move(handle, kHost);
  }
  manager->synchronize();
  manager->audit();
  const TensorResident after = take(*manager, handle);
  EXPECT_EQ(*after.layout(), *value.layout());
  for (std::size_t i = 0; i < value.size(); ++i) {
    EXPECT_TRUE(same(after[i], value[i])) << value.name(i);
    EXPECT_TRUE(after[i].detach().equal(before[i])) << value.name(i);
    EXPECT_FALSE(after[i].is_alias_of(value[i])) << value.name(i);
  }
  EXPECT_TRUE(after["slice"].is_alias_of(after["base"]));
  EXPECT_TRUE(after["tied"].is_alias_of(after["tied too"]));
  EXPECT_FALSE(after["tied"].is_alias_of(after["base"]));
}

TEST_P(DiskTierTest, ChargeIsWhatTheFileTakes) {
  const auto manager = make_manager();
  std::vector<Handle> handles;
  for (const std::int64_t size : {0, 1, 1000, 4096, 1'000'003}) {
    handles.push_back(adopt(*manager, TensorResident({{"x", at::ones({size}, at::kByte)}})));
    manager->move(handles.back(), kDisk).wait();
  }
  std::int64_t taken = 0;
  std::int64_t rounded = 0;
  for (const auto& file : directory_.files()) {
    struct stat status {};
    ASSERT_EQ(::stat(file.c_str(), &status), 0);
    taken += status.st_blocks * 512;
    rounded += Bytes(status.st_size).rounded_up(4096).count();
  }
  EXPECT_EQ(used_at(*manager, kDisk), Bytes(taken));
  EXPECT_EQ(taken, rounded);
  manager->close({.force = true});
}

TEST_P(DiskTierTest, FileIsSafetensorsThatOtherReadersUnderstand) {
  const auto manager = make_manager();
  const TensorResident value = awkward_value();
  const TensorResident before = clone_of(value);
  const Handle handle = adopt(*manager, value);
  manager->move(handle, kDisk).wait();
  ASSERT_EQ(directory_.files().size(), 1U);
  const auto file = SafetensorsFile::open(directory_.files().front());
  for (const char* name :
       {"bytes", "base", "tied", "half", "scalar", "empty", "quote\"and\\umlaut\xc3\xbc"}) {
    ASSERT_TRUE(file->contains(name)) << name;
    const auto reader = create_manager();
    const Handle read = register_source(*reader, *file, {name});
    reader->ensure(read, kHost);
    EXPECT_TRUE(take(*reader, read)[name].equal(before[name])) << name;
  }
  for (const char* name : {"slice", "transposed", "channels_last", "conjugate", "tied too"}) {
    EXPECT_FALSE(file->contains(name)) << name;
  }
  EXPECT_TRUE(file->contains("__storage_2"));
  const auto bytes = bytes_of(file->path());
  EXPECT_EQ(header_bytes_of(bytes) % 8, 0U);
  const std::string header(bytes.begin() + 8,
                           bytes.begin() + static_cast<std::ptrdiff_t>(header_bytes_of(bytes)));
  EXPECT_THAT(header, HasSubstr("channels_last"));
  ContentStamp stamp;
  stamp.add(bytes.data() + header_bytes_of(bytes), bytes.size() - header_bytes_of(bytes));
  EXPECT_THAT(header, HasSubstr("xxh64:" + fixed_width_hex(stamp.value())));
  manager->close({.force = true});
}

TEST_P(DiskTierTest, FileIsReadByTheSafetensorsPackage) {
  const char* python = std::getenv("RESIDENCY_PYTHON");
  if (python == nullptr) {
    GTEST_SKIP() << "RESIDENCY_PYTHON does not name an interpreter that has safetensors and torch";
  }
  const auto manager = make_manager();
  const Handle handle = adopt(*manager, awkward_value());
  manager->move(handle, kDisk).wait();
  const std::string script =
      "import sys, torch; from safetensors.torch import load_file; d = load_file(sys.argv[1]); "
      "assert d['bytes'].tolist() == [0, 1, 2]; "
      "assert torch.equal(d['base'], torch.arange(60.).view(3, 4, 5)); "
      "assert d['scalar'].shape == () and d['empty'].shape == (0, 4); "
      "assert torch.equal(d['half'], torch.arange(9).half())";
  EXPECT_EQ(std::system(("'" + std::string(python) + "' -c \"" + script + "\" '" +
                         directory_.files().at(0).string() + "'")
                            .c_str()),
            0);
  manager->close({.force = true});
}

TEST_P(DiskTierTest, LargeValueInManyChunksWithShortTransfersAndInterrupts) {
  const auto manager = make_manager();
  const at::Tensor before = at::arange(3'000'001, at::kInt);
  const Handle handle =
      adopt(*manager, TensorResident({{"x", before.clone()}, {"y", at::arange(77)}}));
  calls_->short_bytes = 123'456;
  calls_->interrupts = true;
  manager->move(handle, kDisk);
  manager->move(handle, kHost).wait();
  calls_->short_bytes = 0;
  calls_->interrupts = false;
  EXPECT_TRUE(take(*manager, handle)["x"].equal(before));
}

TEST_P(RingTest, RingThatTakesNothingForNowIsAskedAgainAfterACompletionOrDoneWithout) {
  const auto manager = make_manager();
  const at::Tensor before = at::arange(5'000'001, at::kInt);  // twenty chunks
  const Handle handle = adopt(*manager, TensorResident({{"x", before.clone()}}));
  for (const int every : {1, 2, 3}) {
    calls_->submissions_refused = every;
    calls_->num_submissions = 0;
    manager->move(handle, kDisk).wait();
    manager->move(handle, kHost).wait();
    EXPECT_LT(calls_->num_submissions, 100) << "it is not asked without a pause";
    EXPECT_GT(calls_->num_submissions, 1);
  }
  calls_->submissions_refused = 0;
  for (const int shortage : {EAGAIN, EBUSY}) {
    const std::uint64_t num_calls = calls_->num_calls();
    calls_->fail_all("ring_submit", shortage);
    manager->move(handle, kDisk).wait();
    manager->move(handle, kHost).wait();
    EXPECT_LT(calls_->num_calls(), num_calls + 100);
  }
  calls_->fail_all("ring_submit", ENOMEM);
  EXPECT_THROW(manager->move(handle, kDisk).wait(), TransferError);
  calls_->fail_all("", 0);
  manager->move(handle, kDisk).wait();
  manager->move(handle, kHost).wait();
  EXPECT_TRUE(take(*manager, handle)["x"].equal(before));
}

TEST_P(RingTest, FailureWhileTheRingTakesNothingForNowEndsTheTransfer) {
  const auto manager = make_manager();
  const at::Tensor before = at::arange(5'000'001, at::kInt);
  const Handle handle = adopt(*manager, TensorResident({{"x", before.clone()}}));
  calls_->short_bytes = 300'000;  // so that there is something to submit after each completion
  calls_->submissions_refused = 2;
  for (std::uint64_t nth = 1; nth < 40; ++nth) {
    calls_->fail_nth(nth, EIO);
    try {
      manager->move(handle, kDisk).wait();
      calls_->fail_nth(0, 0);
      manager->move(handle, kHost).wait();
    } catch (const StorageError&) {
    } catch (const TransferError&) {
    }
    calls_->fail_nth(0, 0);
    manager->move(handle, kHost).wait();
  }
  EXPECT_TRUE(take(*manager, handle)["x"].equal(before));
}

TEST_P(DiskTierTest, ManyWorkItemsAreDoneInTheOrderOfTheRequests) {
  const auto manager = make_manager();
  std::vector<Handle> handles;
  for (int i = 0; i < 50; ++i) {
    handles.push_back(adopt(*manager, TensorResident({{"x", at::ones({1000}).mul(i)}})));
  }
  std::vector<ActionReport> reports;
  for (const Handle& handle : handles) {
    reports.push_back(manager->move(handle, kDisk));
    reports.push_back(manager->move(handle, kHost));
  }
  reports.back().wait();
  for (const ActionReport& report : reports) {
    EXPECT_TRUE(report.done());
  }
  for (int i = 0; i < 50; ++i) {
    EXPECT_TRUE(
        take(*manager, handles[static_cast<std::size_t>(i)])["x"].equal(at::ones({1000}).mul(i)));
  }
}

TEST_P(DiskTierTest, MissingOrUnwritableDirectoryIsRefusedWhenTheManagerIsMade) {
  ManagerOptions options = with_disk(directory_);
  options.disks.front().directory = directory_.path() / "missing";
  int error_number = 0;
  try {
    (void)make_manager(std::move(options));
  } catch (const StorageError& error) {
    error_number = error.error_number;
    EXPECT_THAT(error.path, HasSubstr("missing"));
  }
  EXPECT_EQ(error_number, ENOENT);
  write_bytes(directory_.path() / "file", {'x'});
  options = with_disk(directory_);
  options.disks.front().directory = directory_.path() / "file";
  EXPECT_THROW((void)make_manager(std::move(options)), StorageError);
  for (const int denied : {EACCES, EROFS, ENOSPC}) {
    calls_->fail_all("mkdir", denied);
    EXPECT_THROW((void)make_manager(), StorageError);
  }
}

TEST_P(DiskTierTest, OpeningFailsAtEachCallAndLeavesNothing) {
  for (std::uint64_t nth = 1;; ++nth) {
    calls_->fail_nth(nth, EIO);
    std::shared_ptr<Manager> manager;
    try {
      manager = make_manager();
    } catch (const StorageError&) {
    }
    const bool injected = calls_->injected();
    calls_->fail_nth(0, 0);
    if (manager != nullptr) {
      manager->close();
    }
    // A directory that could not be cleaned up after the one fault is swept by the next.
    make_manager()->close();
    EXPECT_TRUE(directory_.contents().empty()) << "call " << nth;
    if (!injected) {
      EXPECT_GT(nth, 5U);
      break;
    }
  }
}

TEST_P(DiskTierTest, FullDiskFailsTheActionAtOnceAndLosesNothing) {
  const auto manager = make_manager();
  const Handle handle = adopt(*manager, TensorResident({{"x", at::arange(1000)}}));
  const std::uint64_t version = manager->state_version();
  calls_->fail_all("allocate", ENOSPC);
  int error_number = 0;
  try {
    manager->move(handle, kDisk);
  } catch (const StorageError& error) {
    error_number = error.error_number;
    EXPECT_THAT(error.path, HasSubstr(directory_.path().string()));
  }
  EXPECT_EQ(error_number, ENOSPC);
  EXPECT_EQ(manager->state_version(), version);
  EXPECT_EQ(used_at(*manager, kDisk), Bytes());
  EXPECT_TRUE(directory_.files().empty());
  calls_->fail_all("", 0);
  manager->move(handle, kDisk).wait();
  EXPECT_TRUE(take(*manager, handle)["x"].equal(at::arange(1000)));
}

TEST_P(DiskTierTest, DiskThatFailsAfterEnqueueLeavesTheSourceAndSaysSoAtTheNextTouch) {
  for (const int fault : {ENOSPC, EIO}) {
    const auto manager = make_manager();
    const Handle handle = adopt(*manager, TensorResident({{"x", at::arange(1000)}}));
    calls_->fail_all("rename", fault);
    const ActionReport report = manager->move(handle, kDisk);
    manager->synchronize();
    calls_->fail_all("", 0);
    try {
      manager->ensure(handle, kHost);
      ADD_FAILURE() << "no TransferError";
    } catch (const TransferError& error) {
      EXPECT_EQ(error.handle, handle);
      EXPECT_EQ(error.path, TransferPath::kFile);
      EXPECT_THROW(std::rethrow_exception(error.cause), StorageError);
    }
    EXPECT_TRUE(directory_.files().empty());
    EXPECT_EQ(used_at(*manager, kDisk), Bytes());
    EXPECT_EQ(used_at(*manager, kHost), Bytes(8000));
    manager->audit();
    EXPECT_TRUE(take(*manager, handle)["x"].equal(at::arange(1000)));
  }
}

TEST_P(DiskTierTest, EverySystemCallFailsOnceAndNothingIsLost) {
  const at::Tensor contents = at::arange(700'000);  // several chunks
  std::uint64_t num_faults = 0;
  for (const bool to_memory : {false, true}) {
    for (std::uint64_t nth = 1;; ++nth) {
      const auto manager = make_manager();
      const Handle handle = adopt(*manager, TensorResident({{"x", contents.clone()}}));
      if (to_memory) {
        manager->move(handle, kDisk).wait();
      }
      calls_->fail_nth(nth, EIO);
      try {
        manager->move(handle, to_memory ? kHost : kDisk).wait();
      } catch (const StorageError&) {
      } catch (const TransferError&) {
      }
      const bool injected = calls_->injected();
      calls_->fail_nth(0, 0);
      manager->synchronize();
      manager->audit();
      EXPECT_TRUE(take(*manager, handle)["x"].equal(contents)) << "call " << nth;
      manager->close();
      EXPECT_TRUE(directory_.contents().empty()) << "call " << nth;
      if (!injected) {
        break;
      }
      ++num_faults;
    }
  }
  EXPECT_GT(num_faults, 20U);
}

TEST_P(DiskTierTest, FailedRefreshLosesOnlyTheStaleCopy) {
  const auto manager = make_manager();
  const Handle handle =
      adopt(*manager, TensorResident({{"x", at::zeros({1000})}}),
            {.mode = ReplicaMode::kReplicable, .mutability = Mutability::kMutable});
  manager->ensure(handle, kDisk).wait();
  assign(*manager, handle, TensorResident({{"x", at::ones({1000})}}));
  calls_->fail_all(
      GetParam() == FileEngine::kBlocking || !io_uring_is_usable() ? "pwritev" : "ring_result",
      EIO);
  EXPECT_ANY_THROW(manager->ensure(handle, kDisk).wait());
  calls_->fail_all("", 0);
  manager->synchronize();
  manager->audit();
  manager->ensure(handle, kDisk).wait();
  manager->drop(handle, kHost);
  EXPECT_TRUE(take(*manager, handle)["x"].equal(at::ones({1000})));
}

class DamagedFile : public DiskTierTest {
 protected:
  DamagedFile() : manager_(create_manager(with_disk(directory_))) {
    handle_ = adopt(*manager_, TensorResident({{"x", at::arange(100'000)}}));
    manager_->move(handle_, kDisk).wait();
    path_ = directory_.files().at(0);
    bytes_ = bytes_of(path_);
  }
  ~DamagedFile() override { manager_->close({.force = true}); }

  /// What a move off the disk says, at once or at its end.
  std::string refusal() {
    try {
      manager_->move(handle_, kHost).wait();
    } catch (const MaterializationError& error) {
      return error.what();
    } catch (const TransferError& error) {
      return message_of<MaterializationError>([&] { std::rethrow_exception(error.cause); });
    }
    return {};
  }

  std::shared_ptr<Manager> manager_;
  Handle handle_;
  std::filesystem::path path_;
  std::vector<char> bytes_;
};

INSTANTIATE_TEST_SUITE_P(Engines, DamagedFile, ::testing::Values(FileEngine::kAutomatic),
                         [](const auto&) { return "Automatic"; });

TEST_P(DamagedFile, TruncatedIsRefusedNamingTheFileAndWorksOnceRestored) {
  std::filesystem::resize_file(path_, bytes_.size() / 2);
  EXPECT_THAT(refusal(), ::testing::AllOf(HasSubstr(path_.string()), HasSubstr("truncated")));
  std::filesystem::resize_file(path_, 3);
  EXPECT_THAT(refusal(), HasSubstr("truncated"));
  write_bytes(path_, bytes_);
  EXPECT_EQ(refusal(), "");
  EXPECT_TRUE(take(*manager_, handle_)["x"].equal(at::arange(100'000)));
}

TEST_P(DamagedFile, OneFlippedBitAnywhereIsRefused) {
  for (const std::size_t at : {std::size_t{0}, std::size_t{9}, std::size_t{100},
                               header_bytes_of(bytes_), bytes_.size() - 1}) {
    auto damaged = bytes_;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    write_bytes(path_, damaged);
    EXPECT_THAT(refusal(), ::testing::AllOf(HasSubstr(path_.string()), HasSubstr("corrupt")))
        << "byte " << at;
  }
  write_bytes(path_, bytes_);
  EXPECT_EQ(refusal(), "");
}

TEST_P(DamagedFile, FileOfAnotherRunUnderTheSameNameIsRefused) {
  const TemporaryDirectory elsewhere;
  const auto other = create_manager(with_disk(elsewhere));
  for (const bool same_bytes : {false, true}) {
    const Handle handle = adopt(
        *other, TensorResident({{"x", same_bytes ? at::arange(100'000) : at::arange(1, 100'001)}}));
    other->move(handle, kDisk).wait();
    std::filesystem::copy_file(elsewhere.files().at(0), path_,
                               std::filesystem::copy_options::overwrite_existing);
    EXPECT_THAT(refusal(), HasSubstr("foreign"));
    other->discard(handle);
  }
  other->close();
}

TEST_P(DamagedFile, MissingFileIsAStorageError) {
  std::filesystem::remove(path_);
  EXPECT_THROW(manager_->move(handle_, kHost).wait(), StorageError);
  write_bytes(path_, bytes_);
  EXPECT_EQ(refusal(), "");
}

TEST_P(DiskTierTest, FilesAreGoneWhenTheirMaterializationIsAndWhenTheManagerCloses) {
  const auto manager = make_manager();
  const Handle handle =
      adopt(*manager, TensorResident({{"x", at::ones({4})}}), {.mode = ReplicaMode::kReplicable});
  manager->ensure(handle, kDisk).wait();
  EXPECT_EQ(directory_.files().size(), 1U);
  manager->drop(handle, kDisk);
  EXPECT_TRUE(directory_.files().empty());
  manager->move(handle, kDisk).wait();
  EXPECT_THROW(manager->close(), InUseError);  // the only copy would go
  EXPECT_EQ(directory_.files().size(), 1U);
  manager->close({.force = true});
  EXPECT_TRUE(directory_.contents().empty());
}

TEST_P(DiskTierTest, ClosingWithoutWaitingAbandonsWhatIsInFlight) {
  DiskThread disk_thread(at::ones({1}));
  {
    const auto manager = make_manager();
    for (int i = 0; i < 20; ++i) {
      const Handle handle = adopt(*manager, TensorResident({{"x", at::ones({500'000})}}));
      manager->move(handle, kDisk);
    }
    manager->close({.wait = false, .force = true});
  }
  disk_thread.drain();
  EXPECT_TRUE(directory_.contents().empty());
}

TEST_P(DiskTierTest, ProcessEndsCleanlyWithTransfersInFlightAndAStaticManager) {
  const auto leave = [this] {
    // Nothing that would use OpenMP: its threads do not exist in the child of a death test.
    static const auto manager = make_manager();
    for (int i = 0; i < 20; ++i) {
      const Handle handle = adopt(*manager, TensorResident({{"x", at::empty({500'000})}}));
      manager->move(handle, kDisk);
    }
    std::exit(0);
  };
#ifdef __SANITIZE_ADDRESS__
  const char* said = "";  // the leak checker remarks on the threads of the parent
#else
  const char* said = "^$";
#endif
  EXPECT_EXIT(leave(), ::testing::ExitedWithCode(0), said);
}

TEST_P(DiskTierTest, TwoManagersInOneDirectoryLeaveEachOtherAlone) {
  const auto first = make_manager();
  const Handle handle = adopt(*first, TensorResident({{"x", at::arange(10)}}));
  first->move(handle, kDisk).wait();
  const auto second = make_manager();
  const Handle other = adopt(*second, TensorResident({{"x", at::arange(20)}}));
  second->move(other, kDisk).wait();
  EXPECT_EQ(directory_.files().size(), 2U);
  second->close({.force = true});
  EXPECT_TRUE(take(*first, handle)["x"].equal(at::arange(10)));
  first->close();
  EXPECT_TRUE(directory_.contents().empty());
}

TEST_P(DiskTierTest, WhatACrashLeftIsSweptAtTheNextStart) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto manager = make_manager();
    const Handle handle = adopt(*manager, TensorResident({{"x", at::ones({1000})}}));
    manager->move(handle, kDisk).wait();
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(directory_.files().size(), 1U);
  std::filesystem::create_directory(directory_.path() / "residency-crashed-before-its-lock");
  write_bytes(directory_.path() / "unrelated.safetensors", {'x'});
  std::filesystem::create_directory(directory_.path() / "unrelated");
  const auto manager = make_manager();
  EXPECT_EQ(directory_.files().size(), 1U);  // the unrelated one
  manager->close();
  EXPECT_EQ(directory_.contents().size(), 2U);
}

TEST_P(DiskTierTest, ForkedChildUsesMemoryNotTheDiskAndTakesNothingFromTheParent) {
  const auto manager = make_manager();
  const Handle on_disk = adopt(*manager, TensorResident({{"x", at::arange(1000)}}));
  const Handle in_memory = adopt(*manager, TensorResident({{"x", at::arange(10)}}));
  manager->move(on_disk, kDisk).wait();
  const pid_t child = ::fork();
  if (child == 0) {
    int result = 0;
    Lease lease = manager->acquire(one(in_memory), kHost);
    result |= tensors(lease, in_memory)["x"].equal(at::arange(10)) ? 0 : 1;
    lease.release();
    result |= message_of<ForkError>([&] { manager->move(on_disk, kHost); }).empty() ? 2 : 0;
    result |= message_of<ForkError>([&] { manager->move(in_memory, kDisk); }).empty() ? 4 : 0;
    manager->close({.force = true});
    ::_exit(result);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(take(*manager, on_disk)["x"].equal(at::arange(1000)));
}

TEST_P(DiskTierTest, ForkedChildCanMakeAManagerOfItsOwn) {
  const auto manager = make_manager();
  const Handle handle = adopt(*manager, TensorResident({{"x", at::arange(1000)}}));
  manager->move(handle, kDisk).wait();
  const pid_t child = ::fork();
  if (child == 0) {
    const auto own = make_manager();
    const Handle mine = adopt(*own, TensorResident({{"x", at::arange(100)}}));
    own->move(mine, kDisk).wait();
    const bool right = take(*own, mine)["x"].equal(at::arange(100));
    own->close();
    ::_exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(take(*manager, handle)["x"].equal(at::arange(1000)));
}

/// Holds the first worker that opens a file.
struct HeldCalls final : SystemCalls {
  std::atomic<bool> holds{true};
  std::promise<void> held;
  std::promise<void> released;
  int open(const std::string& path, int flags, mode_t mode) override {
    if (std::this_thread::get_id() != tests_own && holds.exchange(false)) {
      held.set_value();
      released.get_future().wait();
    }
    return SystemCalls::open(path, flags, mode);
  }
  const std::thread::id tests_own = std::this_thread::get_id();
};

TEST_P(DiskTierTest, PrefetchThatIsWaitedForPassesTheOthers) {
  const auto calls = std::make_shared<HeldCalls>();
  calls->holds = false;
  const auto manager =
      create_manager(with_disk(directory_), {.file_engine = GetParam(), .system_calls = calls});
  std::vector<Handle> handles;
  for (int i = 0; i < 4; ++i) {
    handles.push_back(adopt(*manager, TensorResident({{"x", at::arange(i, i + 100)}}),
                            {.mode = ReplicaMode::kReplicable}));
    manager->move(handles.back(), kDisk).wait();
  }
  calls->holds = true;
  std::vector<ActionReport> reports;
  for (const Handle& handle : handles) {
    reports.push_back(manager->ensure(handle, kHost, {.prefetch = true}));
  }
  calls->held.get_future().wait();  // at the first
  reports[3].wait();
  manager->acquire(one(handles[2]), kHost).release();
  EXPECT_FALSE(reports[0].done());
  EXPECT_FALSE(reports[1].done()) << "nobody waits for it";
  calls->released.set_value();
  for (int i = 0; i < 4; ++i) {
    reports[static_cast<std::size_t>(i)].wait();
    Lease lease = manager->acquire(one(handles[static_cast<std::size_t>(i)]), kHost);
    EXPECT_TRUE(
        tensors(lease, handles[static_cast<std::size_t>(i)])["x"].equal(at::arange(i, i + 100)));
    lease.release();
  }
  manager->close();
}

// The manager waits on the host instead, before it asks for the second; other callers need not.
TEST_P(DiskTierTest, WorkerThatWaitsForOneAheadOfNeedIsNotBehindTheOthers) {
  const auto calls = std::make_shared<HeldCalls>();
  calls->holds = false;
  TorchBackend backend({.file_engine = GetParam(), .system_calls = calls});
  backend.open(ManagerId{900001}, with_disk(directory_));
  const auto copy = [&](const BlockPtr& source, Location to, bool ahead_of_need, FencePtr after) {
    CopyRequest request;
    request.source = source;
    request.from = source->location();
    request.to = to;
    request.source_ready = std::move(after);
    request.ahead_of_need = ahead_of_need;
    return backend.copy(request);
  };
  const auto on_disk = [&](float number) {
    const BlockPtr memory = TensorBlock::adopt(TensorResident({{"x", at::full({64}, number)}}));
    const CopyResult made = copy(memory, kDisk, /*ahead_of_need=*/false, nullptr);
    made.ready->wait();
    return made.block;
  };
  const BlockPtr held = on_disk(1);
  const BlockPtr other = on_disk(2);
  calls->holds = true;
  const CopyResult first = copy(held, kHost, /*ahead_of_need=*/true, nullptr);
  calls->held.get_future().wait();
  const CopyResult ahead = copy(other, kHost, /*ahead_of_need=*/true, nullptr);
  const CopyResult needed = copy(ahead.block, kDisk, /*ahead_of_need=*/false, ahead.ready);
  needed.ready->wait();  // for ever, if it were
  EXPECT_EQ(needed.ready->poll(), FenceStatus::kDone);
  EXPECT_EQ(ahead.ready->poll(), FenceStatus::kDone);
  EXPECT_EQ(first.ready->poll(), FenceStatus::kPending);
  calls->released.set_value();
  first.ready->wait();
  const CopyResult back = copy(needed.block, kHost, /*ahead_of_need=*/false, nullptr);
  back.ready->wait();
  EXPECT_TRUE(dynamic_cast<TensorBlock&>(*back.block).tensors()["x"].equal(at::full({64}, 2.0F)));
  backend.close(/*wait=*/true);
}

TEST_P(DiskTierTest, DiskBudgetIsKept) {
  ManagerOptions options = with_disk(directory_);
  options.disks.front().budget = Bytes(8192);
  const auto manager = make_manager(std::move(options));
  const Handle fits = adopt(*manager, TensorResident({{"x", at::ones({1000})}}));
  const Handle too_large = adopt(*manager, TensorResident({{"x", at::ones({2100})}}));
  EXPECT_THROW(manager->move(too_large, kDisk), BudgetError);
  manager->move(fits, kDisk).wait();
  EXPECT_EQ(used_at(*manager, kDisk), Bytes(8192));
  manager->close({.force = true});
}

}  // namespace
}  // namespace residency::testing
